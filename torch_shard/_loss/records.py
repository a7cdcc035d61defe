"""Records in a batch: dataclasses, mappings and classes of torch's pytrees, opened and filled with other values.

JAX's pytrees know none of these. They are not registered with JAX either: that acts on the whole process, and fails
where the user registers the same class later.
"""

import collections
import copy
import dataclasses
import enum
import pathlib
import types
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

_PLAIN = (str, bytes, bool, complex, type(None), np.generic, enum.Enum, pathlib.PurePath)

_OF_TORCH = (torch.dtype, torch.device, torch.Size)

_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, nn.Module)


def is_static(value: object) -> bool:
    """Tell whether a value is a part of the program: a plain one, a function, a module, anything with an equality."""
    if isinstance(value, (*_PLAIN, *_OF_TORCH, *_BY_IDENTITY)):
        return True

    # An object with attributes may hold tensors that its own equality does not compare.
    has_equality = type(value).__hash__ not in (None, object.__hash__)
    return has_equality and not hasattr(value, "__dict__") and not isinstance(value, tuple | frozenset)


@dataclasses.dataclass(frozen=True)
class Record:
    """A record without the values of its parts.

    Attributes:
        kind: Its class.
        about: What else a program depends on: names of the parts, or what torch's pytrees say of it.
        fill: Gives such a record with other values.
    """

    kind: type
    about: Hashable
    fill: Callable[[Sequence[object]], object] = dataclasses.field(compare=False, repr=False)


def open_record(value: Any, path: str) -> tuple[Record, list[tuple[str, object]]] | None:
    """A record and its parts, each with the end of its path; None of anything else."""
    node = torch_pytree.SUPPORTED_NODES.get(type(value))
    if node is not None:
        values, context = node.flatten_fn(value)
        ends = [f"[{number}]" for number in range(len(values))]

        # A context need not be hashable: that of a dict is a list of its keys.
        record = Record(type(value), repr(context), lambda values: node.unflatten_fn(list(values), context))
        return record, list(zip(ends, values, strict=True))

    items = dict(cast(MutableMapping[Any, Any], value)) if isinstance(value, MutableMapping) else None
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if items is None and not is_dataclass:
        return None

    # Not the fields alone: __post_init__ and users set further attributes, which a copy would share with this batch.
    attributes = {f.name: getattr(value, f.name) for f in dataclasses.fields(cast(Any, value))} if is_dataclass else {}
    attributes |= getattr(value, "__dict__", {})
    if isinstance(value, collections.UserDict):
        del attributes["data"]  # the items

    # The encodings of a tokenizer, say, stand in a BatchEncoding beside its tensors. A program cannot depend on them.
    unreadable = dict[str, _Unreadable]()
    for name, attribute in attributes.items() if items is not None else ():
        if not isinstance(attribute, int | float | torch.Tensor | np.ndarray) and not is_static(attribute):
            unreadable[name] = _Unreadable(f"{path}.{name}", type(attribute).__name__)
    names = [name for name in attributes if name not in unreadable]
    items = items or {}

    def filled(record: Any, values: Sequence[object]) -> object:
        record = copy.copy(record)
        for name, part in zip(names, values, strict=False):
            object.__setattr__(record, name, part)  # a frozen dataclass has no other way
        for name, part in unreadable.items():
            object.__setattr__(record, name, part)
        for key, part in zip(items, values[len(names) :], strict=True):
            record[key] = part
        return record

    empty = filled(value, [None] * (len(names) + len(items)))  # which keeps no array of this batch alive
    ends = [f".{name}" for name in names] + [f"[{key!r}]" for key in items]
    parts = [*map(attributes.__getitem__, names), *items.values()]
    return Record(type(value), tuple(ends), lambda values: filled(empty, values)), list(zip(ends, parts, strict=True))


class _Unreadable:
    """What stands in a batch for what is not an array, in a capture: whatever reads it is refused."""

    def __init__(self, path: str, kind: str) -> None:
        self.__dict__.update(path=path, kind=kind)

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
