"""The public function that the user has called: errors begin with its name.

`@public` notes a function, and `caller()` finds the innermost noted one on the stack. So nothing is passed through
the packages, and nothing is wrapped: signatures, doctests, tracebacks and the time of a call are those of the function.
"""

# sys._getframe has no public name.
# pyright: reportPrivateUsage=false

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., object])
_NAMES: dict[CodeType, str | None] = {}


def public(function: _F) -> _F:
    """Let errors raised in this function, and below it, begin with its name; of a constructor, with the class's."""
    return error_prefix(function.__qualname__.removesuffix(".__init__"))(function)


def error_prefix(name: str | None) -> Callable[[_F], _F]:
    """Let errors raised in the decorated function, and below it, begin with `name`.

    Args:
        name: For what runs when the public function has returned: the functions that an adapter returns. None for
            methods of objects whose class states the name, as its attribute `caller`.
    """

    def note(function: _F) -> _F:
        _NAMES[function.__code__] = name
        return function

    return note


def prefix_of(function: Callable[..., object], *args: Any) -> str:
    """Name a noted function, which is given these arguments; empty if it takes them to say that."""
    return _NAMES[function.__code__] or (args[0].caller if args else "")


def caller() -> str:
    """Name the innermost public function under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _NAMES:
            return _NAMES[frame.f_code] or frame.f_locals[frame.f_code.co_varnames[0]].caller
        frame = frame.f_back
    return "torch_shard"
