"""Which values of a function were there before it ran, and containers with other items."""

# What is in the user's containers may be anything.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import collections
import gc
import itertools
from collections.abc import Callable
from typing import Any


class ThereBefore:
    """The objects that are there now: `value in there_before` tells later whether a value was.

    They are kept alive meanwhile, so that none has the address of another.
    """

    def __init__(self) -> None:
        self._objects = gc.get_objects()
        self._ids = set(map(id, self._objects))

    def __contains__(self, value: object) -> bool:
        if id(value) in self._ids:
            return True
        # A dict of plain values is not known to the collector. One that was there is held by something that was.
        return not gc.is_tracked(value) and any(id(holder) in self._ids for holder in gc.get_referrers(value))

    def hold(self, value: object) -> bool:
        """Tell whether something that was there holds a value now."""
        return any(id(holder) in self._ids for holder in gc.get_referrers(value))


def mapped(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A container with what a function makes of its keys and items; anything else as it is."""
    if isinstance(value, tuple):
        items = itertools.starmap(function, enumerate(value))
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) in (list, collections.deque):
        return type(value)(itertools.starmap(function, enumerate(value)))
    if isinstance(value, dict):
        filled = value.copy()
        for key, item in value.items():
            filled[key] = function(key, item)
        return filled
    return value
