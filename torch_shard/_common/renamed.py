"""Arguments under a name of an earlier version: an error that gives the new one."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuse keyword arguments of the decorated function that have another name now.

    Args:
        **names: The new name of each.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if found := kwargs.keys() & names.keys():
                news = ", ".join(f"{old}= is now {names[old]}=" for old in sorted(found))
                raise TypeError(f"{function.__qualname__}: {news}.")
            return function(*args, **kwargs)

        return call

    return decorate
