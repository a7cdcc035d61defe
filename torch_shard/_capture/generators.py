"""Generators of Python and NumPy that a callable draws from: a program would repeat what it drew."""

import contextlib
import gc
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from traceback import FrameSummary
from types import FrameType
from typing import Any

import numpy as np
import torch

from torch_shard._capture.provenance import describe, is_own_file, is_user_file
from torch_shard._capture.reads import named_in

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

_ATOMS = (str, bytes, int, float, complex, bool, torch.Tensor, torch.dtype, types.CodeType, types.ModuleType, FrameType)

_MOST = 50_000
"""Objects that are looked at."""


class Generators:
    """The generators that a callable may draw from: those that all code shares, and those that hang on it."""

    def __init__(self, fn: Callable[..., object]) -> None:
        self._own = [value for value in _reached(fn) if isinstance(value, _KINDS)]
        self._before = self._states()

    def _states(self) -> list[Hashable]:
        return [random.getstate(), repr(np.random.get_state()), *map(_state, self._own)]

    def line_that_draws(self, run: Callable[[], object]) -> str | None:
        """The line of the user's code that has drawn from one of them since this was made; None if there is none."""
        return None if self._states() == self._before else _line_that_changes(self._states, run)


def _state(generator: Any) -> Hashable:
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return repr(bits.get_state() if isinstance(bits, np.random.RandomState) else bits.state)


def _reached(root: object) -> Iterator[object]:
    """What hangs on an object, as far as the user's own code may read it."""
    seen = dict[int, object]()
    waiting = [root]
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen[id(value)] = value
        yield value
        waiting += _held_by(value)


def _held_by(value: Any) -> Iterator[object]:
    if isinstance(value, type):
        return
    if isinstance(value, types.FunctionType):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
        if is_own_file(value.__code__.co_filename):
            yield from (value.__globals__.get(name) for name in named_in(value.__code__))
    elif not isinstance(value, _KINDS):
        yield from (held for held in gc.get_referents(value) if not isinstance(held, type))
        for cls in type(value).__mro__[:-1]:
            yield from (method for method in vars(cls).values() if isinstance(method, types.FunctionType))


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
