"""What a program was made for besides its inputs, and whether it still holds: the ways in which a program is outdated.

These are the training flags of modules (`flags_hold`), the plain Python values that a loss function and a model's
configuration hold (`ValueGuard`), and the plain attributes of modules (`PlainAttributes`).
"""

import copy
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from torch_shard._capture.provenance import is_own_file
from torch_shard._capture.side_effects import _HOOKS, _OF_TORCH, NUMBERS, is_plain, is_record
from torch_shard._common.metric_kinds import is_metric

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


def _followed(fns: Iterable[object]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and reader of each value that functions reach, by themselves and through the user's own functions."""
    todo, seen = list(fns), set[object]()
    for fn in todo:  # which grows
        key = id(getattr(fn, "__func__", fn)), id(getattr(fn, "__self__", None))
        if key in seen or len(seen) == _MOST:
            continue
        seen.add(key)
        owner = fn.__self__ if isinstance(fn, types.MethodType) else fn
        code = getattr(fn if hasattr(fn, "__code__") else type(fn).__call__, "__code__", None)
        for name, read in [*_of_function(fn), (type(owner).__name__, lambda o=owner: o)]:
            value = read()
            yield name, read
            if _is_own(value):
                todo.append(value)
            elif _is_of_own(value):
                for attribute in code.co_names if code else ():
                    held = getattr(value, "__dict__", {})
                    if attribute in held and not isinstance(value, nn.Module):  # those are `PlainAttributes`
                        yield f"{name}.{attribute}", functools.partial(held.get, attribute)
                    todo += [part for part in _functions(value, attribute) if _is_own(part)]


def _functions(value: object, attribute: str) -> list[object]:
    """The function that an attribute of an object, a class or a Python module stands for."""
    found = inspect.getattr_static(value, attribute, None)
    if isinstance(found, types.FunctionType) and not isinstance(value, (type, types.ModuleType)):
        return [types.MethodType(found, value)]
    if isinstance(found, property) and found.fget is not None:
        return [types.MethodType(found.fget, value)]
    return [getattr(found, "__func__", found)]


def _is_own(value: object) -> bool:
    """Tell whether a value is a function in a file of the user's own."""
    code = getattr(value, "__code__", None)
    return (
        isinstance(value, (types.FunctionType, types.MethodType)) and code is not None and is_own_file(code.co_filename)
    )


def _is_of_own(value: object) -> bool:
    """Tell whether a value is a module, a class or an instance of a class, in a file of the user's own."""
    module = (
        value
        if isinstance(value, types.ModuleType)
        else sys.modules.get(value.__module__ if isinstance(value, type) else type(value).__module__)
    )
    file = getattr(module, "__file__", None)
    return module is not None and (module.__name__ == "__main__" or (file is not None and is_own_file(file)))


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
    """The plain values that a loss function reads from outside, and the records among a model's attributes.

    Plain functions, methods and modules of the user's own files are followed: what a loss, or a forward, reads through
    them counts as well. What installed libraries read by themselves does not.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., object]) -> None:
        records = {
            id(value): (f"{path}.{name}" if path else name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if is_record(value)
        }
        forwards = [types.MethodType(type(module).forward, module) for module in model.modules()]
        readers = [
            *_of_function(loss_fn),
            *_followed([loss_fn, *(forward for forward in forwards if _is_own(forward))]),
            *((name, lambda v=value: v) for name, value in records.values()),
        ]
        self._values = [(name, read, found) for name, read in readers if (found := _snapshot(read())) is not None]

    def changed(self) -> str | None:
        """The name of one that has another value now."""
        return next((name for name, read, before in self._values if _snapshot(read()) != before), None)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The numbers and strings: a program keeps them until they change."""
        values = ((name, read()) for name, read, _ in self._values)
        return tuple(dict.fromkeys(f"{name} = {value!r}" for name, value in values if isinstance(value, NUMBERS)))


class PlainAttributes:
    """The numbers, strings, containers of them and tensors among a module's plain attributes: what a program reads."""

    def __init__(self, module: nn.Module) -> None:
        skipped = _OF_TORCH | _HOOKS
        self._values = [
            (f"{name}.{attribute}" if name else attribute, vars(m), attribute, copy.deepcopy(value) if plain else value)
            for name, m in module.named_modules()
            if not is_metric(m)
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
