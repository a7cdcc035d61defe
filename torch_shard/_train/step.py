"""The common part of training and evaluation: batches onto the mesh, one compiled program per signature."""

import dataclasses
import logging
import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_shard._common.validate import check_kind
from torch_shard._device import BatchLayout, put
from torch_shard._lowering import capture_settings
from torch_shard._scan import REMAT, LayerOptions
from torch_shard._sharding import LossFn, ResolvedPlan, ShardingPlan, check_mesh, holdings, shared_memory
from torch_shard._train.batch import BatchSignature, flatten_batch, leaf_paths
from torch_shard._train.compile_cache import CompileCache
from torch_shard._train.fused_projections import find_fused
from torch_shard._train.loss_program import LossProgram, loss_program
from torch_shard._train.microbatches import Microbatches

logger = logging.getLogger(__name__)

_REQUIRES_GRAD, _TRAINING = operator.attrgetter("requires_grad"), operator.attrgetter("training")


@dataclasses.dataclass(frozen=True)
class Placed:
    """A batch on the mesh, with what a program depends on in it."""

    arrays: list[jax.Array]
    signature: BatchSignature


class Step:
    """The common part of training and evaluation: one compiled program per signature of the batch."""

    caller: str
    train: bool

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        mesh: Mesh,
        plan: ShardingPlan,
        spec: PartitionSpec | None,
        compute_dtype: torch.dtype | None,
        repeats: LayerOptions,
        accumulate_steps: int = 1,
        compile_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        check_mesh(mesh, caller=self.caller)
        check_kind(self.caller, "model", model, torch.nn.Module)
        check_kind(self.caller, "loss_fn", loss_fn, Callable)
        check_kind(self.caller, "plan", plan, ShardingPlan)
        check_kind(self.caller, "batch_spec", spec, PartitionSpec | None)
        _check_compute_dtype(self.caller, compute_dtype)
        _check_repeats(self.caller, repeats)
        self.model, self.loss_fn, self.mesh, self.compute_dtype = model, loss_fn, mesh, compute_dtype
        self.plan: ResolvedPlan = plan.resolve(model, mesh)
        names = list(holdings(model).all)
        self.repeats = dataclasses.replace(repeats, specs=tuple((n, self.plan[n].spec) for n in names))
        self.layout = BatchLayout(mesh, spec, self.caller)
        self._asked = mesh, plan, spec, compute_dtype
        self._compile_directory = compile_cache
        self._microbatches = Microbatches(accumulate_steps, self.layout)
        self._cache = CompileCache(compile_cache, self.caller)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._held = holdings(model)
        if (names := shared_memory(self._held.all)) is not None:
            raise NotImplementedError(
                f"{self.caller}: {names[0]} and {names[1]} share memory: one is a view of the other, or both are views "
                "of one tensor. On a mesh each has its own. Register a .clone() as one of them, or make the view in "
                "forward."
            )
        self._modules = list(model.modules())
        self._params = list(self._held.params.values())
        self._trains = list(map(_REQUIRES_GRAD, self._params))
        self._compiled: dict[Any, Compiled] = {}
        self._checked: set[BatchSignature] = set()
        self.num_compiles = 0
        """Number of programs that were compiled so far."""

    @property
    def draws_random(self) -> bool:
        """Tell whether a program that was compiled so far draws random numbers."""
        return any(compiled.random for compiled in self._compiled.values())

    def _prepare(self, batch: Any, state: Any = None, guard: float | None = None) -> tuple["Compiled", list[jax.Array]]:
        """The compiled program for this batch and this limit of the gradient norm, and the batch on the mesh."""
        self._check_requires_grad()
        leaves, signature = (None, batch.signature) if isinstance(batch, Placed) else flatten_batch(batch)
        flags = tuple(map(_TRAINING, self._modules)) if self.train else ()
        key = (signature, flags, capture_settings(), guard)
        compiled = self._compiled.get(key)
        reason = compiled.outdated() if compiled else None
        if compiled is None or reason:
            placed = (batch if leaves is None else self.put(batch)).arrays
            compiled = self._compile(signature, placed, state, guard)
            if self._compiled:
                reason = reason or _difference(key, list(self._compiled)[-1])
                logger.info("%s compiles again: %s", self.caller, reason)
            self._compiled[key] = compiled
            self.num_compiles += 1
            return compiled, placed
        return compiled, batch.arrays if leaves is None else self.layout.put(leaves)

    def _check_requires_grad(self) -> None:
        if list(map(_REQUIRES_GRAD, self._params)) == self._trains:
            return
        changed = [n for n, t in self._held.params.items() if t.requires_grad != (n in self._held.trainable)]
        raise ValueError(
            f"{self.caller}: requires_grad of {', '.join(changed)} has changed since the step was made, so its state "
            "no longer fits the model. Make a new step, and carry the values over with step.export(state)."
        )

    def put(self, batch: Any) -> Placed:
        """Put a batch on the mesh ahead of the step, which takes what this returns in place of the batch.

        Args:
            batch: A pytree of CPU tensors, numpy arrays or arrays; global sizes, leading dim split over `batch`.

        Raises:
            ValueError: It does not divide over the mesh.
        """
        leaves, signature = flatten_batch(batch)
        if signature not in self._checked:
            paths = [p for p, kind in zip(leaf_paths(batch), signature.leaves, strict=True) if hasattr(kind, "shape")]
            self.layout.check(leaves, paths)
            self._microbatches.check(leaves, paths)
            self._checked.add(signature)
        return Placed(self.layout.put(leaves), signature)

    def _compile(
        self, signature: BatchSignature, placed: list[jax.Array], state: Any, guard: float | None
    ) -> "Compiled":
        if list(holdings(self.model).all) != list(self._held.all):
            raise ValueError(
                f"{self.caller}: parameters or buffers were added to the model or removed since the step was made, so "
                "its state no longer fits. Make a new step."
            )
        program = loss_program(
            self.model,
            self.loss_fn,
            self._microbatches.signature(signature),
            compute_dtype=self.compute_dtype,
            train=self.train,
            caller=self.caller,
            repeats=self.repeats,
        )
        self._check_reach(program)
        budget = self.repeats.remat if isinstance(self.repeats.remat, int) else None
        options = placed, guard
        compiled = self._jitted(program, *options) if budget is None else self._within(budget, program, state, *options)
        compiled.fused = list(map(str, find_fused(program, self.plan, self.layout.spec)))
        for finding in compiled.fused:
            logger.warning("%s: %s", self.caller, finding)
        return compiled

    def _jitted(self, program: LossProgram, placed: list[jax.Array], guard: float | None) -> "Compiled":
        return Compiled(program, self._jit(program, [a.sharding for a in placed], guard), self.replicated, self._cache)

    def _within(
        self, budget: int, program: LossProgram, state: Any, placed: list[jax.Array], guard: float | None
    ) -> "Compiled":
        """The program that computes the least again of those that fit into a budget of bytes per device."""
        found = {}
        for choice in self.repeats.choices if program.rolled else self.repeats.choices[:1]:
            compiled = self._jitted(program.with_remat(choice), placed, guard)
            with self._cache.active():
                found[choice] = compiled.num_bytes(self._normal(state), placed)
            if found[choice] <= budget:
                compiled.chosen = [f"remat={choice!r} takes {found[choice]} of {budget} bytes per device."]
                logger.info("%s: %s", self.caller, compiled.chosen[0])
                return compiled
        raise ValueError(
            f"{self.caller}: no choice of remat fits into {budget} bytes per device: "
            + ", ".join(f"{choice!r} takes {size}" for choice, size in found.items())
            + ". Use smaller batches (accumulate_steps=), split more parameters, or raise the budget."
        )

    def _check_reach(self, program: LossProgram) -> None:
        """Refuse parameters that only some batches reach: torch then keeps a count of steps for each, optax has one."""
        for earlier in self._compiled.values():
            differing = set(earlier.without_grad) ^ set(program.without_grad)
            if differing and self.train:
                raise NotImplementedError(
                    f"{self.caller}: the loss reaches {', '.join(sorted(differing))} for some batches and not for "
                    "others. torch skips a parameter without a gradient, moments and step count included, and an optax "
                    "state cannot. Make the loss reach them always (+ 0 * p.sum()), or make one step per kind of batch "
                    "with the others frozen."
                )

    def _jit(self, program: LossProgram, batch_shardings: list[Any], guard: float | None) -> Callable[..., Any]:
        raise NotImplementedError

    def report(self) -> str:
        """Say which layers run as loops in the programs compiled so far, of the others why not, and what is slow.

        With a number of bytes as `remat`, also what that chose.
        """
        if not self._compiled:
            return "Nothing was compiled yet."
        layers = [line for compiled in self._compiled.values() for line in compiled.report] or [self._why_none()]
        more = [line for compiled in self._compiled.values() for line in (*compiled.chosen, *compiled.fused)]
        return "\n".join(dict.fromkeys(layers + more))

    def _why_none(self) -> str:
        """Say why no layers were looked at."""
        if not self.repeats.wanted:
            return "No layers are loops: scan_layers=False."
        return f"No layers repeat: there are no {self.repeats.least} numbered siblings that look alike."

    def _normal(self, state: Any) -> Any:
        """The state as the program takes it."""
        return state

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """JAX's lowered program for this state and batch: `.as_text()`, `.compile().memory_analysis()`, ..."""
        compiled, arrays = self._prepare(batch, state)
        return compiled.jitted.lower(self._normal(state), arrays, compiled.closure())  # pyright: ignore


def _check_compute_dtype(caller: str, dtype: Any) -> None:
    if dtype not in (None, torch.bfloat16):
        raise ValueError(
            f"{caller}: compute_dtype must be torch.bfloat16 or None, got {dtype}. (float16 would need a scaled loss; "
            "for another precision throughout, convert the model itself: model.double().)"
        )


def _check_repeats(caller: str, repeats: LayerOptions) -> None:
    if not isinstance(repeats.scan, bool) and repeats.scan != "auto":
        raise ValueError(f'{caller}: scan_layers must be True, False or "auto", got {repeats.scan!r}.')
    is_budget = isinstance(repeats.remat, int) and not isinstance(repeats.remat, bool) and repeats.remat > 0
    if repeats.remat not in REMAT and not is_budget:
        choices = ", ".join(map(repr, REMAT))
        raise ValueError(f"{caller}: remat must be {choices} or a number of bytes, got {repeats.remat!r}.")


def _difference(key: tuple, earlier: tuple) -> str:
    """Say what differs between the signatures of two programs."""
    (signature, flags, settings, guard), (old, old_flags, old_settings, old_guard) = key, earlier
    if flags != old_flags:
        return "modules were switched between train() and eval()"
    if settings != old_settings:
        return "torch's default dtype, autocast or JAX's x64 setting changed"
    if guard != old_guard:
        return f"max_grad_norm changed from {old_guard} to {guard}"
    if signature.tree != old.tree:
        return f"the structure of the batch changed from {old.tree} to {signature.tree}"
    pairs = zip(old.leaves, signature.leaves, strict=True)
    changed = [f"{was} is now {now}" for was, now in pairs if was != now]
    return "in the batch, " + "; ".join(changed)


class Compiled:
    """A jitted program and the tensors that its loss closes over."""

    def __init__(
        self, program: LossProgram, jitted: Callable[..., Any], sharding: NamedSharding, cache: CompileCache
    ) -> None:
        self.program, self.jitted, self._tensors, self._sharding = program, jitted, program.closure, sharding
        self.outdated, self.without_grad = program.outdated, program.without_grad
        self._cold: CompileCache | None = cache  # until the first call, which compiles
        self.random, self.report = program.random, program.report
        self.fused: list[str] = []
        """Warnings about projections that are split across their pieces."""
        self.chosen: list[str] = []
        """The choice that a budget of bytes made."""
        self._placed: list[tuple[int, jax.Array]] = [(-1, None)] * len(self._tensors)  # pyright: ignore

    def closure(self) -> list[jax.Array]:
        """Current values of the closed-over tensors on the mesh; moved again only when torch has written to them."""
        for i, tensor in enumerate(self._tensors):
            if self._placed[i][0] != tensor._version:
                self._placed[i] = (tensor._version, put(tensor.detach(), self._sharding))
        return [array for _, array in self._placed]

    def num_bytes(self, state: Any, arrays: list[jax.Array]) -> int:
        """Memory of one device while the program runs: arguments, results and what is in between."""
        memory = self.jitted.lower(state, arrays, self.closure()).compile().memory_analysis()  # pyright: ignore
        parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
        return sum(parts) - memory.alias_size_in_bytes

    def __call__(self, state: Any, arrays: list[jax.Array]) -> Any:
        closure = self.closure() if self._tensors else []
        if self._cold is None:
            return self.jitted(state, arrays, closure)
        with self._cold.active():
            out = self.jitted(state, arrays, closure)
        self._cold = None
        return out
