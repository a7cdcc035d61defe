"""The compiled programs of a step, and what can be asked of them."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import collections
import contextlib
import dataclasses
import logging
import operator
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.export
import torch
from jax.core import Tracer
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding

from torch_shard._capture import Mismatch
from torch_shard._common.caller import caller
from torch_shard._common.convert import struct_of
from torch_shard._common.patching import without_collection
from torch_shard._common.progress import telling_when_slow
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_path
from torch_shard._cost import (
    Cost,
    ProgramMemory,
    TooLarge,
    compile_or_refuse,
    costs_of,
    memory_of_program,
    partitioner_refusals,
)
from torch_shard._device import put
from torch_shard._hosts import begin_run, is_shared
from torch_shard._loss import HostValues, LossProgram
from torch_shard._lowering import Looks
from torch_shard._state import TrainState
from torch_shard._train.model_tensors import Contents

# Compiled programs kept on disk between processes: JAX's own compilation cache, for our programs alone.


_LOCK = threading.RLock()


class CompileCache:
    """A directory for compiled programs, or none.

    JAX's cache is a setting of the whole process. Here it is set for one compilation at a time and then put back, so
    that neither the user's other programs nor a cache of their own take part.

    Programs of several CPU devices are compiled anew, also where JAX is set to a cache: what XLA:CPU (jaxlib 0.10.2)
    reads back has lost the order of its collectives, and devices that begin with different ones wait forever.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, mesh: Mesh) -> None:
        self.directory = None if directory is None else check_path("compile_cache", directory).absolute()
        self._is_off = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise ValueError(
                f"{caller()}: compile_cache={str(directory)!r} must be a directory that can be written to: {error}. "
                "Name another, or leave compile_cache out."
            ) from error

    @contextlib.contextmanager
    def active(self) -> Generator[None, None, None]:
        """Take what is compiled within from the directory, or write it there however small it is."""
        settings = self._settings()
        if not settings:
            yield
            return
        with _LOCK:
            before = {name: getattr(jax.config, name) for name in settings}
            _configure(settings)
            try:
                yield
            finally:
                _configure(before)

    def _settings(self) -> dict[str, object]:
        if self._is_off:
            return {"jax_enable_compilation_cache": False} if jax.config.values["jax_compilation_cache_dir"] else {}
        if self.directory is None:
            return {}
        return {
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_dir": str(self.directory),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
            # XLA's caches for GPUs would put the directory's path into the key: moved or mounted elsewhere, no hits.
            "jax_persistent_cache_enable_xla_caches": "none",
        }


def _configure(settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()  # JAX reads the directory once; from now on, at the next compilation


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProgramLoop:
    """Repeated layers that a program runs as one loop.

    Attributes:
        num_iterations: Of the loop.
        layers: Paths of the modules, in the order in which they run.
        is_backward: Whether it is their backward pass.
    """

    num_iterations: int
    layers: tuple[str, ...]
    is_backward: bool


class StepProgram:
    """One compiled program of a step, of `step.programs`.

    Attributes:
        loss: What it was made of.
        report: Lines that say which layers are loops, and of the others why not, and which attention has no kernel.
        num_calls: How often it ran.
        looks: When a second look at the loss is due.
        key: What it is for.
        reads_texts: Whether it is for the texts of its batch alone; None where no other batch has come.
        tensors: Those whose values it is given beside state and batch.
    """

    def __init__(
        self,
        loss: LossProgram,
        jit: Callable[..., Callable[..., Any]],
        options: dict[str, Any] | None,
        sharding: NamedSharding,
        cache: CompileCache,
        *,
        inputs: tuple[torch.Tensor, ...],
        agree: Callable[["StepProgram", TrainState, Sequence[PyTree]], None],
        key: Any,
    ) -> None:
        self.loss, self._sharding, self._agree, self.key = loss, sharding, agree, key
        self._jitted = jit(compiler_options=options)
        self._nested = jit()  # JAX takes options of what is compiled by itself alone
        self.tensors = (*loss.closure, *inputs)
        self._cold: CompileCache | None = cache  # until the first call, which compiles
        self._structs: tuple[TrainState, PyTree] | None = None
        self.report, self.num_calls, self.looks = [*loss.report], 0, Looks()
        self.reads_texts: bool | None = None
        self._given: tuple[list[torch.Tensor], list[jax.Array]] | None = None
        self._is_shared = is_shared(cast(Mesh, sharding.mesh))
        self._placed: list[tuple[Contents, jax.Array] | None] = [None] * len(self.tensors)

    @property
    def loops(self) -> tuple[ProgramLoop, ...]:
        """The loops over repeated layers, in the order in which they run, forward and backward."""
        loops = () if self.loss.rolled is None else self.loss.rolled.loops
        return tuple(ProgramLoop(len(loop.iterations), tuple(loop.layers), loop.is_backward) for loop in loops)

    @property
    def collectives(self) -> dict[str, int]:
        """Number of collectives of each kind in the compiled program; one in a loop counts once.

        Raises:
            ValueError: The program has not run yet.
        """
        return dict(collections.Counter(cost.collective.kind for cost in self._costs if cost.collective is not None))

    @property
    def num_flops(self) -> float:
        """Floating-point operations of the products of one run, on one device; of a loop, of all its iterations."""
        return sum(cost.flops for cost in self._costs)

    @property
    def _costs(self) -> list[Cost]:
        return costs_of(self.compiled.as_text() or "")

    @property
    def memory(self) -> ProgramMemory:
        """Bytes that one device holds while it runs."""
        return memory_of_program(self.compiled, self._platform)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """JAX's own compiled program, compiled once more to be looked at."""
        if self._structs is None:
            raise ValueError("step.programs: the program has not run yet. Call the step, or use step.lower.")
        return self.lower(*self._structs).compile()

    @property
    def _platform(self) -> str:
        return cast(Mesh, self._sharding.mesh).devices.flat[0].platform

    def lower(self, state: TrainState, arrays: Sequence[PyTree]) -> jax.stages.Lowered:
        """JAX's lowered program for a state, as the program takes it, and a batch on the mesh, or structs of them."""
        return self._jitted.lower(state, arrays, self._closure_structs())  # pyright: ignore[reportFunctionMemberAccess]

    def export(self, state: TrainState, arrays: Sequence[PyTree], platforms: Sequence[str]) -> jax.export.Exported:
        """The program of structs like these as a function of the leaves of `(state, arrays, closure)`."""
        leaves, tree = cast(tuple[list[Any], Any], jax.tree.flatten((state, arrays, self._closure_structs())))

        def run(leaves: list[Any]) -> list[Any]:
            return jax.tree.leaves(self._nested(*jax.tree.unflatten(tree, leaves)))

        return jax.export.export(jax.jit(run), platforms=platforms)(leaves)

    def _closure_structs(self) -> list[jax.ShapeDtypeStruct]:
        return [struct_of(tensor).update(sharding=self._sharding) for tensor in self.tensors]

    def num_bytes(self, state: TrainState, arrays: Sequence[jax.Array]) -> int | TooLarge:
        """Memory of one device while the program runs, or why it cannot."""
        compiled = compile_or_refuse(self.lower(state, arrays))
        return compiled if isinstance(compiled, TooLarge) else memory_of_program(compiled, self._platform).peak

    def fit(self, values: HostValues) -> list[jax.Array] | Mismatch:
        """The inputs that are computed on the host from a batch, or what has another value than the program is for."""
        found = self.loss.fit(values)
        if isinstance(found, Mismatch):
            return found
        if self._given is None or not all(map(operator.is_, found, self._given[0])):
            self._given = found, [put(tensor, self._sharding) for tensor in found]
        return self._given[1]

    def _value(self, position: int, tensor: torch.Tensor) -> jax.Array:
        """The current value of a tensor on the mesh; moved again only when it was written to."""
        placed = self._placed[position]
        if placed is None or not placed[0].hold():
            contents = Contents(tensor)
            try:
                array = put(tensor.detach(), self._sharding, rounds=True)
            except OverflowError as error:
                raise OverflowError(f"{caller()}: a tensor that is closed over: {error}") from error
            self._placed[position] = placed = (contents, array)
        return placed[1]

    def __call__(self, state: TrainState, arrays: Sequence[PyTree]) -> PyTree:
        self.num_calls += 1
        closure = list(map(self._value, range(len(self.tensors)), self.tensors))
        if any(isinstance(array, Tracer) for array in (*arrays, state.step)):  # these compile what is around it
            return self._nested(state, arrays, closure)
        if self._cold is None:
            if self._is_shared:
                begin_run()
            return self._jitted(state, arrays, closure)
        structs, start = jax.tree.map(_struct, (state, arrays)), time.perf_counter()  # before they are donated
        shown = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(arrays)[:8])
        message = (
            "%s: XLA compiles the program for a batch of %s, once for these shapes; of large models it takes minutes."
        )
        compiling = telling_when_slow(logger, message, caller(), shown)
        mesh = cast(Mesh, self._sharding.mesh)
        with compiling, self._cold.active(), without_collection(), partitioner_refusals(mesh):
            self._agree(self, state, arrays)
            if self._is_shared:
                begin_run()
            out = self._jitted(state, arrays, closure)
        self._cold, self._structs = None, structs
        logger.info("%s: ready in %.1f s, for a batch of %s", caller(), time.perf_counter() - start, shown)
        return out


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
