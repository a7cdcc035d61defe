"""Containers of Python with other items."""

# What is in containers may be anything.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import collections
import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any


def mapped(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A container of the same class with what a function makes of its keys and items; anything else as it is."""
    if isinstance(value, dict):
        filled = copy.copy(value)  # with the factory of a defaultdict
        for key, item in value.items():
            filled[key] = function(key, item)
        return filled
    if not isinstance(value, (list, tuple, collections.deque)):
        return value
    items = itertools.starmap(function, enumerate(value))
    if isinstance(value, collections.deque):
        return collections.deque(items, value.maxlen)
    return as_tuple(type(value), items) if isinstance(value, tuple) else type(value)(items)


def as_tuple(cls: type[tuple[Any, ...]], items: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of a class, which may be a named one."""
    return cls(*items) if hasattr(cls, "_fields") else cls(items)


class Same:
    """Equal if it is the same object: tensors have no equality that is one truth."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
