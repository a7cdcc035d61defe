"""The common part of adapters: a JAX function as a torch function, compiled once per signature."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import torch

from torch_shard._capture import ModuleFlags, flags_hold
from torch_shard._common.convert import adopt_torch_nodes
from torch_shard._common.random import Key
from torch_shard._common.types import PyTree
from torch_shard._interop.closure import CLOSURE, MoreInputs, Reader
from torch_shard._interop.views import call_pure
from torch_shard._lowering import Program, capture_settings

A = ParamSpec("A")
R = TypeVar("R")

Pure = Callable[..., PyTree]
"""A JAX function of `(key, *args, **kwargs)`."""

Transform = Callable[[Pure, int], Pure]
"""Maps a function of `(closed-over arrays, key, *args, **kwargs)`, of so many args, to its compiled form."""

NUM_GIVEN = 2  # the closed-over arrays and the key stand before the arguments


def adapt(fn: Callable[A, object], pure: Callable[..., R]) -> Callable[A, R]:
    """`pure` as a torch function named after `fn`."""

    def adapted(*args: A.args, **kwargs: A.kwargs) -> R:
        adopt_torch_nodes((args, kwargs))
        return call_pure(pure, args, kwargs, random=True)

    if not isinstance(fn, torch.nn.Module):
        functools.update_wrapper(adapted, fn)
    adapted._torch_shard_pure = pure  # pyright: ignore[reportFunctionMemberAccess]
    return adapted


class PerClosure:
    """A compiled form of `pure` per set of closed-over tensors, training flags and settings of torch."""

    def __init__(self, pure: Pure, transform: Transform) -> None:
        self.pure, self.transform = pure, transform
        self._variants: list[_Variant] = []

    def __call__(self, key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        settings = CLOSURE.token or capture_settings()
        variant = next(
            (v for v in self._variants if v.settings == settings and (CLOSURE.token or v.is_current())), None
        )
        if variant is None:
            variant = _Variant(self, settings, ())
            self._variants.append(variant)
        while True:
            try:
                return variant(key, args, kwargs)
            except MoreInputs as request:
                if CLOSURE.readers and not variant.traced:
                    raise
                wider = _Variant(self, settings, (*variant.closure, *request.tensors))
                self._variants[self._variants.index(variant)] = variant = wider


class _Variant:
    """The compiled form for one set of closed-over tensors."""

    def __init__(self, owner: PerClosure, settings: object, closure: tuple[torch.Tensor, ...]) -> None:
        self.owner, self.settings, self.closure = owner, settings, closure
        self.flags: list[ModuleFlags] = []
        self.programs: list[Program[Any]] = []
        self.compiled: dict[int, Pure] = {}
        self.traced = False

    def is_current(self) -> bool:
        """Tell whether modules still have the training flags, and what was read the values, of the trace."""
        return all(map(flags_hold, self.flags)) and all(program.graph.is_current() for program in self.programs)

    def __call__(self, key: Key, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        if len(args) not in self.compiled:
            self.compiled[len(args)] = self.owner.transform(self._run, len(args))
        self.traced = False
        values = CLOSURE.values(self.closure)
        if not CLOSURE.traces:
            for program in self.programs:
                program.look_again()
        result = self.compiled[len(args)](values, key, *args, **kwargs)
        if CLOSURE.readers:  # what this depends on, a trace around it does too
            CLOSURE.readers[-1].modules.extend(self.flags)
            CLOSURE.readers[-1].programs.extend(self.programs)
        return result

    def _run(self, values: list[jax.Array], key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        self.traced = True
        reader = Reader(self.closure, values)
        with reader.active():
            result = self.owner.pure(key, *args, **kwargs)
        self.flags.extend(flags for flags in reader.modules if flags not in self.flags)
        self.programs.extend(program for program in reader.programs if program not in self.programs)
        return result


def shift(positions: int | Sequence[int], by: int = 1) -> Any:
    """Argument positions of the user's function as positions of ours, which has `by` more in front."""
    if isinstance(positions, int):
        return positions + by if positions >= 0 else positions
    return tuple(shift(operator.index(p), by) for p in positions)
