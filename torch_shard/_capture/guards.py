"""What a program was made for besides its inputs, and whether it still holds: the ways in which a program is outdated.

These are the training flags of modules (`flags_hold`), and values that are read from outside (`Guard`): those that the
user's own functions have read (`reads`), and the plain attributes of modules (`module_roots`).
"""

import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator

import numpy as np
import torch
from torch import nn

from torch_shard._capture.side_effects import _OF_TORCH, NUMBERS, Place, is_plain, is_record
from torch_shard._capture.walk import (
    FUNCTIONS,
    HOOKS,
    Leaf,
    Names,
    Root,
    Walk,
    first_difference,
)


class Guard:
    """Values that were read from outside, by the roots from which they are reached.

    Args:
        roots: Of what was read.
        settings: As of `Walk`.
        without: Places that a program does not depend on: it writes to them after each call.
    """

    def __init__(self, roots: Iterable[Root], settings: Names | None = None, without: Iterable[Place] = ()) -> None:
        self._roots, self._settings, self._without = list(roots), settings, tuple(without)
        self._walk = self._walked()

    def _walked(self) -> Walk:
        walk = Walk(self._settings, functions=True, without=self._without)
        for root in self._roots:
            walk.root(root)
        return walk

    @property
    def too_large(self) -> tuple[str, ...]:
        """Names, with their sizes, of what is too large to be compared at each step."""
        return tuple(self._walk.too_large)

    def changed(self) -> str | None:
        """The name of a value that is another one now."""
        if self._walk.holds():
            return None
        now = self._walked()
        if (name := first_difference(self._walk.values, now.values)) is None:
            self._walk = now  # other objects, with the same values
        return name

    def renew(self) -> None:
        """Take the present values for those that were read."""
        self._walk = self._walked()

    def difference(self, other: "Guard") -> str | None:
        """The name of the first value that is another one for another guard."""
        return first_difference(self._walk.values, other._walk.values)

    def names(self, name: str) -> bool:
        """Tell whether code of the user's own reads a global of this name."""
        return any(root.name == name for root in self._roots)

    @property
    def leaves(self) -> Iterator[tuple[str, object]]:
        """What is compared as a whole, with its name: numbers, strings, tensors and other objects."""
        return ((name, leaf.value) for name, leaf in self._walk.values if isinstance(leaf, Leaf))

    @property
    def hashed(self) -> list[tuple[str, object]]:
        """As of `Walk`."""
        return self._walk.hashed

    @property
    def arrays(self) -> list[tuple[str, np.ndarray]]:
        """NumPy arrays, with their names."""
        return [(name, held) for name, held, _ in self._walk.arrays if isinstance(held, np.ndarray)]

    @property
    def frozen(self) -> tuple[str, ...]:
        """The numbers and strings: a program keeps them until they change."""
        numbers = (f"{name} = {value!r}" for name, value in self.leaves if isinstance(value, NUMBERS))
        return tuple(dict.fromkeys(numbers))


def metric_kinds() -> tuple[type, ...]:
    """The classes whose instances gather values over calls."""
    torchmetrics = sys.modules.get("torchmetrics")
    found = (getattr(torchmetrics, name, None) for name in ("Metric", "MetricCollection"))
    return tuple(kind for kind in found if isinstance(kind, type))


def module_roots(modules: Iterable[tuple[str, nn.Module]], own: nn.Module) -> Iterator[Root]:
    """The plain attributes, functions and tensors of modules, their submodules and hooks."""
    inputs = set(map(id, own.modules()))
    for path, module in modules:
        if isinstance(module, metric_kinds()):  # an effect: its values are others after each step
            continue
        held = vars(module)
        prefix = f"{path}." if path else ""
        tensors = () if id(module) in inputs else ("_parameters", "_buffers")
        yield Root(f"{prefix}forward", held, "forward", None)
        yield Root(f"{type(module).__name__}.forward", type(module), "forward", None)
        for name in ("_modules", *HOOKS, *tensors):  # which are never assigned
            if isinstance(found := held.get(name), dict):  # those of a scripted module are elsewhere
                yield Root(f"{prefix}{name}", None, found, None)
        for name, value in held.items():
            if (
                name not in _OF_TORCH
                and "_hooks" not in name
                and name != "forward"
                and value is not None
                and _is_setting(value)
            ):
                yield Root(f"{prefix}{name}", held, name, None)


def _is_setting(value: object) -> bool:
    kinds = (torch.Tensor, np.ndarray, types.BuiltinFunctionType, *FUNCTIONS)
    return isinstance(value, kinds) or is_plain(value) or is_record(value)


def read_by(fn: types.FunctionType) -> tuple[Hashable, ...]:
    """Now, the plain values that a function reads from outside, also as attributes of what it names."""
    names = frozenset(fn.__code__.co_names)
    walk = Walk(None, functions=False)
    walk.root(Root(fn.__name__, None, fn, names))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        walk.root(Root(name, cell, "cell_contents", names))
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            walk.root(Root(name, fn.__globals__, name, names))
    return tuple(walk.values)


ModuleFlags = tuple[tuple[weakref.ref[nn.Module], bool], ...]


def flags_hold(flags: ModuleFlags) -> bool:
    """Tell whether every module still has its training flag; one that is gone cannot have changed it."""
    return all((module := ref()) is None or module.training == flag for ref, flag in flags)
