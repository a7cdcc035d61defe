"""What a program was made for besides its inputs, and whether it still holds: the ways in which a program is outdated.

These are the training flags of modules (`flags_hold`), and values that are read from outside (`Guard`): those that the
user's own functions have read (`reads`), and the plain attributes of modules (`module_roots`).
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_shard._capture.side_effects import _OF_TORCH, NUMBERS, is_plain, is_record
from torch_shard._capture.walk import (
    FUNCTIONS,
    HOOKS,
    Leaf,
    Names,
    Root,
    Walk,
    attribute_of,
    first_difference,
    instance_dict,
)
from torch_shard._common.metric_kinds import is_metric


class Guard:
    """Values that were read from outside, by the roots from which they are reached.

    Args:
        roots: Of what was read.
        settings: As of `Walk`.
        functions: As of `Walk`.
    """

    def __init__(self, roots: Iterable[Root], settings: Names | None = None, *, functions: bool = True) -> None:
        self._roots, self._settings, self._functions = list(roots), settings, functions
        self._walk = self._walked()

    def _walked(self) -> Walk:
        walk = Walk(self._settings, functions=self._functions)
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

    def same(self, other: "Guard") -> bool:
        """Tell whether another one is of the same values."""
        return self._walk.values == other._walk.values

    def difference(self, other: "Guard") -> str | None:
        """The name of the first value that is another one for another guard."""
        return first_difference(self._walk.values, other._walk.values)

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


def module_roots(modules: Iterable[tuple[str, nn.Module]], own: nn.Module) -> Iterator[Root]:
    """The plain attributes, functions and tensors of modules, their submodules and hooks."""
    inputs = set(map(id, own.modules()))
    for path, module in modules:
        if is_metric(module):
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


def _of_function(fn: object) -> Iterator[tuple[str, Any, Any]]:
    """Name, owner and key of each value that a function names, as of a `Root`."""
    if isinstance(fn, functools.partial):
        yield "an argument of functools.partial", None, (fn.args, fn.keywords)
        yield from _of_function(fn.func)
    elif isinstance(fn, types.MethodType):
        if not isinstance(fn.__self__, nn.Module):
            yield from _of_object(fn.__self__, fn.__func__)
        yield from _of_function(fn.__func__)
    elif isinstance(fn, types.FunctionType):
        for part in ("__defaults__", "__kwdefaults__"):
            yield f"a default of {fn.__name__}()", fn, part
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield name, cell, "cell_contents"
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                yield name, fn.__globals__, name
    elif not isinstance(fn, nn.Module):
        yield from _of_object(fn, type(fn).__call__)


def _of_object(owner: object, method: object) -> Iterator[tuple[str, Any, Any]]:
    """The attributes that a method names."""
    for name in getattr(getattr(method, "__code__", None), "co_names", ()):
        if name in instance_dict(owner):
            yield f"{type(owner).__name__}.{name}", vars(owner), name


def read_by(fn: Any) -> tuple[Hashable, ...]:
    """Now, the plain values that a function reads from outside, also as attributes of what it names."""
    names = frozenset(fn.__code__.co_names)
    walk = Walk(None, functions=False)
    for name, owner, key in _of_function(fn):
        walk.root(Root(name, owner, key, names))
    return tuple(walk.values)


def reached_by(model: nn.Module, loss_fn: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """Values that a loss function and the forward methods of a model read from outside, with their names."""
    forwards = dict.fromkeys(inspect.getattr_static(type(module), "forward") for module in model.modules())
    for fn in (loss_fn, *(forward for forward in forwards if isinstance(forward, types.FunctionType))):
        for name, owner, key in _of_function(fn):
            value = key if owner is None else owner.get(key) if isinstance(owner, dict) else attribute_of(owner, key)
            yield name, value


ModuleFlags = tuple[tuple[weakref.ref[nn.Module], bool], ...]


def flags_hold(flags: ModuleFlags) -> bool:
    """Tell whether every module still has its training flag; one that is gone cannot have changed it."""
    return all((module := ref()) is None or module.training == flag for ref, flag in flags)
