"""The compiled program of a step, with the tensors that its loss closes over."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from torch_shard._compile_cache import CompileCache
from torch_shard._device.placement import put
from torch_shard._loss import LossProgram


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
        """What to say of projections that are split across their pieces."""
        self.chosen: list[str] = []
        """What a budget of bytes chose."""
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
