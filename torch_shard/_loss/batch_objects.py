"""Objects in a batch: taken apart into arrays and plain values, and put together again with other tensors."""

import collections
import copy
import dataclasses
import enum
import types
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NoReturn, cast

import jax
import numpy as np
import torch
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree

Array = torch.Tensor | np.ndarray[Any, Any] | jax.Array

_PLAIN = (str, bytes, int, complex, type(None), np.generic, enum.Enum, torch.dtype, torch.device, torch.Size)

_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, nn.Module)

_SEQUENCES = (list, tuple, collections.deque)

# PyTorch Geometric's own notes on how to take a batch apart again: of other lengths than the batch.
_NOTES = frozenset({"_slice_dict", "_inc_dict"})


def is_static(value: object) -> bool:
    """Tell whether a value is a part of the program: a plain one, a function, a module, anything with an equality."""
    if isinstance(value, (*_PLAIN, float, *_BY_IDENTITY)):
        return True
    hashed = type(value).__hash__ not in (None, object.__hash__)
    return hashed and not _is_container(value) and not list(_children(value))


@dataclasses.dataclass(frozen=True)
class TakenApart:
    """An object without its arrays.

    Attributes:
        parts: Path of each part within the object, and what a program depends on in it.
        skeleton: The object with empty tensors in the places of its arrays.
        holes: These.
        kept: What a copy shares with the object.
    """

    parts: tuple[tuple[str, Hashable], ...]
    skeleton: object = dataclasses.field(compare=False, repr=False)
    holes: tuple[torch.Tensor, ...] = dataclasses.field(compare=False, repr=False)
    kept: tuple[object, ...] = dataclasses.field(compare=False, repr=False)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        """The object with these tensors in the places of its arrays."""
        memo: dict[int, object] = {id(value): value for value in self.kept}
        memo |= {id(hole): tensor for hole, tensor in zip(self.holes, tensors, strict=True)}
        return copy.deepcopy(self.skeleton, memo)

    def __str__(self) -> str:
        return f"{type(self.skeleton).__name__} of {len(self.holes)} arrays"

    def difference(self, other: "TakenApart") -> str:
        """Say in which parts another object differs."""
        old, new = dict(self.parts), dict(other.parts)
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return ", ".join(
            f"{name or 'the object'} was {_said(old.get(name))} and is {_said(new.get(name))}" for name in names
        )


def take_apart(value: object, path: str) -> tuple[TakenApart, list[tuple[str, Array]]]:
    """The parts of an object, and its arrays with their paths."""
    walk = _Walk(path)
    walk.visit(value, "")
    if id(value) in walk.unknown:
        raise TypeError(
            f"{caller()}: {path} is of type {type(value).__name__}, which is neither an array nor an object whose "
            "attributes can be read. Pass its arrays in a dict or a tuple."
        )
    holes = [torch.empty(tuple(array.shape), device="meta") for _, array in walk.arrays]
    memo = {id(array): hole for (_, array), hole in zip(walk.arrays, holes, strict=True)} | walk.unknown
    memo |= {id(kept): kept for kept in walk.kept}
    try:
        skeleton = copy.deepcopy(value, cast(dict[int, object], memo))
    except Exception as error:
        raise TypeError(
            f"{caller()}: {path} is of type {type(value).__name__}, which cannot be copied to hold other tensors "
            f"({error}). Pass its arrays in a dict or a tuple."
        ) from error
    return TakenApart(tuple(walk.parts), skeleton, tuple(holes), tuple(walk.kept)), walk.arrays


def _said(part: Hashable) -> str:
    value: object = cast(tuple[object, object], part)[1] if isinstance(part, tuple) else part
    return value.__name__ if isinstance(value, type) else repr(value)


class _Walk:
    """A walk through an object, each part once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.parts: list[tuple[str, Hashable]] = []
        self.arrays: list[tuple[str, Array]] = []
        self.kept: list[object] = []
        self.unknown: dict[int, object] = {}
        self._seen: dict[int, int] = {}

    def visit(self, value: object, path: str) -> None:
        if isinstance(value, float):
            self.parts.append((path, repr(value)))  # not a number is equal to itself, too
        elif isinstance(value, weakref.ref):
            self.parts.append((path, weakref.ref))
        elif is_static(value):
            self.parts.append((path, (type(value), cast(Hashable, value))))
            if isinstance(value, _BY_IDENTITY):
                self.kept.append(value)
        elif id(value) in self._seen:
            self.parts.append((path, self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self.parts.append((path, type(value)))
            self._open(value, path)

    def _open(self, value: object, path: str) -> None:
        if isinstance(value, np.ndarray) and cast(Any, value).dtype.kind not in "biufcV":
            self.unknown[id(cast(object, value))] = _Unknown(self._path + path, f"array of {cast(Any, value).dtype}")
        elif isinstance(value, torch.Tensor | np.ndarray | jax.Array):
            self.arrays.append((path, cast(Array, value)))
        elif (children := list(_children(value))) or _is_container(value):
            for name, child in children:
                if name.lstrip(".") in _NOTES:
                    self.unknown[id(child)] = _Unknown(self._path + path + name, type(child).__name__)
                else:
                    self.visit(child, path + name)
        else:
            self.unknown[id(value)] = _Unknown(self._path + path, type(value).__name__)


def _is_container(value: object) -> bool:
    return isinstance(value, (dict, set, frozenset, *_SEQUENCES)) or hasattr(value, "__dict__")


def _children(value: object) -> Iterator[tuple[str, object]]:
    """What an object holds, by the end of its path: entries, attributes and slots."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in cast(dict[object, object], value).items())
    elif isinstance(value, _SEQUENCES):
        yield from ((f"[{i}]", item) for i, item in enumerate(cast(Sequence[object], value)))
    elif isinstance(value, set | frozenset):
        yield from (("{}", item) for item in sorted(cast(set[object], value), key=repr))
    owner = cast(object, value)
    yield from ((f".{name}", item) for name, item in getattr(owner, "__dict__", {}).items())
    for cls in type(owner).__mro__:
        slots: object = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else cast(Sequence[str], slots):
            name = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                yield f".{name}", getattr(owner, name)


class _Unknown:
    """What stands in a batch for what is not an array, in a capture: whatever reads it is refused."""

    def __init__(self, path: str, kind: str) -> None:
        self.__dict__.update(path=path, kind=kind)

    def __deepcopy__(self, memo: object) -> "_Unknown":
        return self

    def __next__(self) -> NoReturn:
        self._refuse()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"The loss reads {self.__dict__['path']}, of type {self.__dict__['kind']}, which is neither an array nor a "
            "plain value: a compiled program would keep that of its first batch. Pass what is needed of it as a tensor."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, of what an object can do
            raise AttributeError(name)
        self._refuse()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __str__ = __eq__ = __float__ = __int__ = _refuse
    __hash__ = object.__hash__
