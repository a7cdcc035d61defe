"""Generators of Python, NumPy and torch that hang on an object, and a callable that draws from some in a capture.

A program would repeat what it drew from those of Python and NumPy.
"""

import contextlib
import gc
import random
import sys
import types
from collections.abc import Callable, Iterator
from traceback import FrameSummary
from types import FrameType
from typing import Any

import numpy as np
import torch

from torch_shard._capture.provenance import describe, is_own_file, is_user_file
from torch_shard._capture.reads import named_in
from torch_shard._common.generators import state_of

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

_ATOMS = (str, bytes, int, float, complex, torch.Tensor, torch.dtype, np.ndarray, type, random.SystemRandom)
_ATOMS = (*_ATOMS, types.CodeType, types.ModuleType, FrameType)

_MOST_OBJECTS, _MOST_ITEMS = 50_000, 64  # that are looked at; of a container that is not taken for data


def find_generators(root: object, *, of_data: bool) -> list[Any]:
    """The generators that hang on an object: in attributes, closures and containers, and as globals of own functions.

    Args:
        root: The object.
        of_data: Whether it gives data: what is in long containers is that, and functions of libraries count as well.
    """
    found, seen, waiting, classes = list[Any](), dict[int, object](), [root], set[type]()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen[id(value)] = value
        if isinstance(value, _KINDS):
            found.append(value)
        elif not of_data or not isinstance(value, dict | list | tuple | set | frozenset) or len(value) <= _MOST_ITEMS:
            waiting += reversed([*_held_by(value, of_data), *_methods_of(value, classes)])
    return found


def _methods_of(value: object, classes: set[type]) -> Iterator[object]:
    """The functions of an object's class and of those that it derives from, each class once."""
    if not isinstance(value, types.FunctionType):
        for cls in type(value).__mro__[:-1]:
            if cls not in classes:
                classes.add(cls)
                yield from (method for method in vars(cls).values() if isinstance(method, types.FunctionType))


def _held_by(value: Any, of_data: bool) -> Iterator[object]:
    if isinstance(value, types.FunctionType):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
        named = [value.__globals__.get(name) for name in sorted(named_in(value.__code__))]
        if is_own_file(value.__code__.co_filename):
            yield from named
        elif of_data:
            of_module = (each for each in named if getattr(each, "__globals__", None) is value.__globals__)
            yield from (*of_module, *(each for each in named if isinstance(each, _KINDS)))
    else:
        yield from gc.get_referents(value)


class Generators:
    """The generators that a callable may draw from: those that all code shares, and those that hang on it."""

    def __init__(self, fn: Callable[..., object]) -> None:
        own = (found for found in find_generators(fn, of_data=False) if not isinstance(found, torch.Generator))
        self._all: list[Any] = [random, np.random, *own]
        self._before = self._states()

    def _states(self) -> list[str]:
        return [repr(state_of(generator)) for generator in self._all]

    def line_that_draws(self, run: Callable[[], object]) -> str | None:
        """The line of the user's code that has drawn from one of them since this was made; None if there is none."""
        return None if self._states() == self._before else _line_that_changes(self._states, run)


def _line_that_changes(states: Callable[[], object], run: Callable[[], object]) -> str | None:
    """Run a callable and give the line of the user's code, if there is one, after which there are other states."""
    before, lines, found = states(), list[FrameSummary](), list[FrameSummary]()

    def look(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if found or not is_user_file(frame.f_code.co_filename):
            return None
        if states() != before:
            found.extend(lines)
        elif event == "line":
            lines[:] = [FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)]
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        with contextlib.suppress(Exception):  # what it was refused for is to be said
            run()
    finally:
        sys.settrace(tracing)
    return describe(found[0]) if found else None
