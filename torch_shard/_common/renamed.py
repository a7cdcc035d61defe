"""Arguments under a name of an earlier version, or of another library: an error that gives the name here."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuse keyword arguments that have another name in the decorated function.

    Args:
        **names: The name of each here.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if found := kwargs.keys() & names.keys():
                news = ", ".join(f"{old}= is called {names[old]}=" for old in sorted(found))
                raise TypeError(f"{function.__qualname__}: {news}.")
            return function(*args, **kwargs)

        return call

    return decorate
