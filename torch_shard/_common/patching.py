"""Other attributes for the current thread: what a capture replaces stays as it is for everybody else."""

import contextlib
import functools
import gc
import threading
import types
from collections.abc import Callable, Generator
from typing import Any, cast

Owner = type | types.ModuleType

_LOCK = threading.Lock()

_REPLACED: dict[tuple[int, str], "_Attribute"] = {}


@contextlib.contextmanager
def patched(owner: Owner, name: str, wrap: Callable[[Any], object]) -> Generator[None, None, None]:
    """Replace an attribute of a class or module for the current thread; the other threads go on with the original.

    Several threads may replace the same attribute, and each may do so within its own replacement: when the last of
    them has left, in whatever order, the original is back.

    Args:
        owner: A class; or a module, of which only functions can be replaced.
        name: Of the attribute: a function, a property or a plain value, which instances may hide by their own.
        wrap: Given what stands in the class for this thread, the function itself and not a bound method, makes what
            is to stand there.

    Example:
        >>> class Lamp:
        ...     def colour(self):
        ...         return "white"
        >>> with patched(Lamp, "colour", lambda original: lambda lamp: f"not {original(lamp)}"):
        ...     Lamp().colour()
        'not white'
        >>> Lamp().colour()
        'white'
    """
    attribute = _replace(owner, name)
    stack = attribute.stack()
    try:
        stack.append(wrap(attribute.current()))
        try:
            yield
        finally:
            stack.pop()
    finally:
        _leave(attribute)


@contextlib.contextmanager
def without_collection() -> Generator[None, None, None]:
    """Let Python's garbage collector rest: what is traced is kept, and it would look at all objects of the process."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@contextlib.contextmanager
def having(owner: object, **values: object) -> Generator[None, None, None]:
    """Let an object, as one of `threading.local`, have other attributes within."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class _Attribute:
    """Stands in a class while some thread has replaced an attribute, and is to each thread what it is to see."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.owner: Any = owner
        self.name, self.num_users = name, 0
        self.is_own = name in vars(owner)
        owners: tuple[object, ...] = owner.__mro__ if isinstance(owner, type) else (owner,)
        self.original: Any = next(vars(o)[name] for o in owners if name in vars(o))
        self.installed: Any = self
        self._local = threading.local()

    def stack(self) -> list[Any]:
        """The replacements of this thread, the last of which counts."""
        return self._local.__dict__.setdefault("stack", [])

    def current(self) -> Any:
        """Give the attribute as this thread has it."""
        found = [self.original, *self.stack()][-1]
        return found.current() if isinstance(found, _Attribute) else found  # inherited from where it is replaced too

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        found = self.current()
        return found.__get__(instance, owner) if hasattr(type(cast(object, found)), "__get__") else found


class _DataAttribute(_Attribute):
    """Of a property: instances cannot hide it."""

    def __set__(self, instance: object, value: object) -> None:
        self.current().__set__(instance, value)


def _replace(owner: Owner, name: str) -> _Attribute:
    with _LOCK:
        attribute = _REPLACED.get((id(owner), name))
        if attribute is None:
            attribute = _make(owner, name)
            setattr(owner, name, attribute.installed)
            _REPLACED[id(owner), name] = attribute
        attribute.num_users += 1
        return attribute


def _make(owner: Owner, name: str) -> _Attribute:
    attribute = _Attribute(owner, name)
    if isinstance(owner, types.ModuleType):  # its attributes are taken as they are

        @functools.wraps(attribute.original)
        def call(*args: object, **kwargs: object) -> object:
            return attribute.current()(*args, **kwargs)

        attribute.installed = call
    elif hasattr(type(cast(object, attribute.original)), "__set__"):
        attribute = _DataAttribute(owner, name)
    return attribute


def _leave(attribute: _Attribute) -> None:
    with _LOCK:
        attribute.num_users -= 1
        if attribute.num_users:
            return
        owner, name = attribute.owner, attribute.name
        del _REPLACED[id(owner), name]
        held = cast(dict[str, object], vars(owner))
        if held.get(name) is not attribute.installed:  # assigned anew by somebody else, meanwhile
            return
        if attribute.is_own:
            setattr(owner, name, attribute.original)
        else:
            delattr(owner, name)
