"""What a program was made for besides its inputs, and whether it still holds: the ways in which a program is outdated.

These are the training flags of modules (`flags_hold`), the plain Python values that a loss function and a model's
configuration hold (`ValueGuard`), and the plain attributes of modules (`PlainAttributes`).
"""

import copy
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from torch_shard._capture.side_effects import _HOOKS, _OF_TORCH, is_plain, is_record

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SEQUENCES = (list, tuple, set, frozenset)

_DEPTH, _MOST = 3, 1000


def _snapshot(value: object, depth: int = _DEPTH) -> object:
    """Copy that can be compared later: numbers, strings, tensors, in containers and records; else None."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return "tensor", id(value)  # one that is written in place is read anew, another one is not
    if depth == 0 or (isinstance(value, (dict, *_SEQUENCES)) and len(value) > _MOST):
        return None
    if isinstance(value, dict):
        return tuple((str(key), _snapshot(inner, depth - 1)) for key, inner in value.items())
    if isinstance(value, _SEQUENCES):
        return tuple(_snapshot(inner, depth - 1) for inner in value)
    return _snapshot(vars(value), depth) if is_record(value) else None


def _of_function(fn: object) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and reader of each value that a function reaches by itself."""
    if isinstance(fn, functools.partial):
        yield "an argument of functools.partial", lambda: (fn.args, fn.keywords)
        yield from _of_function(fn.func)
    elif isinstance(fn, types.MethodType):
        if not isinstance(fn.__self__, nn.Module):
            yield from _of_object(fn.__self__, fn.__func__)
        yield from _of_function(fn.__func__)
    elif isinstance(fn, types.FunctionType):
        yield f"a default of {fn.__name__}()", lambda: (fn.__defaults__, fn.__kwdefaults__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield name, functools.partial(_read_cell, cell)
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                yield name, functools.partial(fn.__globals__.get, name)
    elif not isinstance(fn, nn.Module):
        yield from _of_object(fn, type(fn).__call__)


def _of_object(owner: object, method: object) -> Iterator[tuple[str, Callable[[], object]]]:
    """The attributes that a method names."""
    for name in getattr(getattr(method, "__code__", None), "co_names", ()):
        if name in getattr(owner, "__dict__", {}):
            yield f"{type(owner).__name__}.{name}", functools.partial(vars(owner).get, name)


def _read_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def read_by(fn: Callable[..., object]) -> tuple[object, ...]:
    """Now, the plain values that a function reads from outside, also as attributes of classes that it names."""
    found = []
    for name, read in _of_function(fn):
        value = read()
        if isinstance(value, type):
            named = set(fn.__code__.co_names).intersection(vars(value))
            value = {attribute: vars(value)[attribute] for attribute in sorted(named)}
        found.append((name, _snapshot(value)))
    return tuple(found)


def reached_by(model: nn.Module, loss_fn: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """Values that a loss function and the forward methods of a model read from outside, with their names."""
    forwards = dict.fromkeys(inspect.getattr_static(type(module), "forward") for module in model.modules())
    for fn in (loss_fn, *(forward for forward in forwards if isinstance(forward, types.FunctionType))):
        yield from ((name, read()) for name, read in _of_function(fn))


class ValueGuard:
    """The plain values that a loss function reads from outside, and the records among a model's attributes."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., object]) -> None:
        records = {
            id(value): (f"{path}.{name}" if path else name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if is_record(value)
        }
        readers = [*_of_function(loss_fn), *((name, lambda v=value: v) for name, value in records.values())]
        self._values = [(name, read, found) for name, read in readers if (found := _snapshot(read())) is not None]

    def changed(self) -> str | None:
        """The name of one that has another value now."""
        return next((name for name, read, before in self._values if _snapshot(read()) != before), None)


class PlainAttributes:
    """The numbers, strings, containers of them and tensors among a module's plain attributes: what a program reads."""

    def __init__(self, module: nn.Module) -> None:
        skipped = _OF_TORCH | _HOOKS
        self._values = [
            (f"{name}.{attribute}" if name else attribute, vars(m), attribute, copy.deepcopy(value) if plain else value)
            for name, m in module.named_modules()
            for attribute, value in vars(m).items()
            if attribute not in skipped
            and ((plain := value is not None and is_plain(value)) or isinstance(value, torch.Tensor))
        ]
        _, self._owners, self._names, self._found = zip(*self._values, strict=True) if self._values else [()] * 4

    def changed(self) -> str | None:
        """The path of one that has another value now; a tensor written in place is read anew, and not another."""
        # Asked at every step, so at first without a line of Python for each: the same objects have the same values. A
        # container is never the same object as its copy, nor is a number that was assigned anew: those are looked at.
        if all(map(operator.is_, map(dict.get, self._owners, self._names), self._found)):
            return None
        for path, attributes, attribute, value in self._values:
            now = attributes.get(attribute)
            if now is value:
                continue
            if isinstance(value, torch.Tensor) or type(now) is not type(value) or not is_plain(now) or now != value:
                return path
        return None


ModuleFlags = tuple[tuple[weakref.ref[nn.Module], bool], ...]


def flags_hold(flags: ModuleFlags) -> bool:
    """Tell whether every module still has its training flag; one that is gone cannot have changed it."""
    return all((module := ref()) is None or module.training == flag for ref, flag in flags)
