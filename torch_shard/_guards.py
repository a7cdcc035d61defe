"""Plain Python values that a loss function and a model's configuration hold: a program was made for what they were."""

import argparse
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, tuple, set, frozenset)
_DEPTH, _MOST = 3, 1000


def _is_record(value: Any) -> bool:
    """Whether a value is a bundle of settings, to be looked into."""
    if isinstance(value, type):
        return False
    is_known = isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or dataclasses.is_dataclass(value)
    return is_known or (type(value).__name__.endswith("Config") and hasattr(value, "__dict__"))


def _snapshot(value: Any, depth: int = _DEPTH) -> Any:
    """What can be compared later: numbers, strings and tensors, in containers and records; None for anything else."""
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
    return _snapshot(vars(value), depth) if _is_record(value) and hasattr(value, "__dict__") else None


def _of_function(fn: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
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


def _of_object(owner: Any, method: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The attributes that a method names."""
    for name in getattr(getattr(method, "__code__", None), "co_names", ()):
        if name in getattr(owner, "__dict__", {}):
            yield f"{type(owner).__name__}.{name}", functools.partial(vars(owner).get, name)


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def read_by(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """Now, the plain values that a function reads from outside, also as attributes of classes that it names."""
    found = []
    for name, read in _of_function(fn):
        value = read()
        if isinstance(value, type):
            named = set(fn.__code__.co_names).intersection(vars(value))
            value = {attribute: vars(value)[attribute] for attribute in sorted(named)}
        found.append((name, _snapshot(value)))
    return tuple(found)


def reached_by(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[Any]:
    """What a loss function and the forward methods of a model read from outside."""
    forwards = dict.fromkeys(inspect.getattr_static(type(module), "forward") for module in model.modules())
    for fn in (loss_fn, *(forward for forward in forwards if isinstance(forward, types.FunctionType))):
        yield from (read() for _, read in _of_function(fn))


class Guard:
    """The plain values that a loss function reads from outside, and the records among a model's attributes."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        records = {
            id(value): (f"{path}.{name}" if path else name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if _is_record(value)
        }
        readers = [*_of_function(loss_fn), *((name, lambda v=value: v) for name, value in records.values())]
        self._values = [(name, read, found) for name, read in readers if (found := _snapshot(read())) is not None]

    def changed(self) -> str | None:
        """The name of one that has another value now."""
        return next((name for name, read, before in self._values if _snapshot(read()) != before), None)
