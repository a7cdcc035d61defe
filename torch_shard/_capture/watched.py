"""Containers that note whether a function reads what was in them before it ran."""

import collections
import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch_shard._capture.late_numbers import is_old
from torch_shard._capture.provenance import current_user_line

_PACKAGE = __name__.partition(".")[0]


class _Watched:
    """What both have in common.

    Attributes:
        base: The class of what it stands for.
        is_emptied: Whether all that was in it has been taken out.
        is_touched: Whether items were added or set.
        read_at: The line that was the first to read what was in it before, or its length.
        num_appended, num_prepended: How many items were added at its ends.
        end_read_at: The line that was the first to use an item by its distance from the end.
    """

    base: type
    is_emptied = False
    is_touched = False
    read_at: str | None = None
    end_read_at: str | None = None
    num_appended = 0
    num_prepended = 0

    def note_read(self) -> None:
        """Note that what was in it before is read, unless it is this package that reads it."""
        if self.is_emptied or self.read_at is not None:
            return
        if not _is_asked_by_this_package():
            self.read_at = current_user_line()

    def note_key(self, key: Any, item: Any) -> None:
        """Note the use of an item that was in it before; a number among these tells by itself if it is asked."""
        if self._is_new(key):
            return
        if not isinstance(key, int) or not is_old(item):
            self.note_read()
        elif key < 0 and self.end_read_at is None:
            self.end_read_at = current_user_line()

    def _is_new(self, key: object) -> bool:
        """Tell whether a key is one of an item that the function has just appended."""
        return isinstance(key, int) and -self.num_appended <= key < 0


def _is_asked_by_this_package() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(container: Any, *args: Any, **kwargs: Any) -> Any:
        container.note_read()
        return original(container, *args, **kwargs)

    return method


_OF_ANY = ("__eq__", "__ne__", "__len__", "__iter__", "__contains__", "__repr__", "__reduce_ex__")
_READS = (*_OF_ANY, "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__", "count", "index")
_OF_DICTS = ("__getitem__", "__reversed__", "__or__", "__ror__", "copy", "get", "items", "keys", "values")
_OF_DICTS = (*_OF_DICTS, "pop", "popitem", "setdefault")


def _watched(parent: Any, *, reads: Iterable[str]) -> Any:
    """A class like `parent` whose methods of these names note that they read."""

    class Watched(_Watched, parent):
        base = parent

        def __getitem__(self, key: Any) -> Any:
            item = parent.__getitem__(self, key)
            self.note_key(key, item)
            return item

    for name in (*_READS, *reads):
        setattr(Watched, name, _noting(getattr(parent, name)))
    return Watched


def _watched_and_mutable(parent: Any, *, reads: Iterable[str]) -> Any:
    """The same of a class whose items can be set and added."""
    watched = _watched(parent, reads=("__reversed__", "copy", "pop", "remove", "reverse", *reads))

    class Watched(watched):
        def __setitem__(self, key: Any, value: Any) -> None:
            self.is_touched = True
            if key == slice(None):
                self.is_emptied = True
            elif isinstance(key, slice) or key < 0:
                self.note_key(key, parent.__getitem__(self, key))
            parent.__setitem__(self, key, value)

        def __delitem__(self, key: Any) -> None:
            self.is_emptied = self.is_emptied or key == slice(None)
            self.note_read()
            parent.__delitem__(self, key)

        def insert(self, index: int, value: Any) -> None:
            self.is_touched = True
            self.num_prepended += 1
            if index != 0:
                self.note_read()
            parent.insert(self, index, value)

        def append(self, value: Any) -> None:
            self.is_touched = True
            self.num_appended += 1
            parent.append(self, value)

        def extend(self, values: Iterable[Any]) -> None:
            for value in list(values):
                self.append(value)

        def __iadd__(self, values: Iterable[Any]) -> Any:
            self.extend(values)
            return self

        def clear(self) -> None:
            self.is_touched = self.is_emptied = True
            parent.clear(self)

    return Watched


WatchedTuple: Any = _watched(tuple, reads=())
WatchedList: Any = _watched_and_mutable(list, reads=("__imul__", "sort"))
_Deque: Any = _watched_and_mutable(collections.deque, reads=("__copy__", "__imul__", "popleft", "rotate"))


class WatchedDeque(_Deque):
    """A queue that notes reads."""

    def appendleft(self, value: Any) -> None:
        self.is_touched = True
        self.num_prepended += 1
        super().appendleft(value)

    def extendleft(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self.appendleft(value)


class WatchedDict(_Watched, dict[Any, Any]):
    """A dict that notes reads."""

    base = dict


for _name in (*_OF_ANY, *_OF_DICTS):
    setattr(WatchedDict, _name, _noting(getattr(dict, _name)))


def watched(container: Any) -> Any:
    """A copy of a list, a queue, a tuple or a dict that notes reads."""
    if isinstance(container, dict):
        return WatchedDict(container)
    if isinstance(container, collections.deque):
        return WatchedDeque(container, container.maxlen)
    return WatchedTuple(container) if isinstance(container, tuple) else WatchedList(container)


def is_watched(value: Any) -> bool:
    """Tell whether a value is such a container."""
    return isinstance(value, _Watched)
