"""Clocks and generators that a callable reads: what it makes of them would be the same in every run of a program."""

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from traceback import FrameSummary
from types import FrameType
from typing import Any

import numpy as np

from torch_shard._capture.provenance import describe, is_user_file
from torch_shard._common.overrides import instead_of_attribute

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")

_NOTED = threading.local()


@contextlib.contextmanager
def clocks_noted() -> Generator[list[str], None, None]:
    """Give a list to which each clock is added that a capture within reads, but for those that libraries read."""
    outer, _NOTED.names = getattr(_NOTED, "names", None), list[str]()
    try:
        yield _NOTED.names
    finally:
        _NOTED.names = outer


def _noting(name: str, clock: Callable[[], Any]) -> Callable[[], Any]:
    def read() -> Any:
        noted: list[str] | None = getattr(_NOTED, "names", None)
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  (beyond what `patched` calls this by)
        if noted is not None and is_user_file(frame.f_code.co_filename):
            noted.append(f"time.{name}() in line {frame.f_lineno} of {frame.f_code.co_filename}")
        return clock()

    return read


for _name in (name + unit for name in _CLOCKS for unit in ("", "_ns")):
    instead_of_attribute(time, _name)(_noting(_name, getattr(time, _name)))


def draws_so_far() -> tuple[object, ...]:
    """The states of the generators that all code shares, of Python and of numpy."""
    kind, words, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(words).tobytes(), *rest


def line_that_draws(run: Callable[[], object]) -> str:
    """Run a callable again, slowly, and say which line of the user's code draws from these generators."""
    before, lines, found = draws_so_far(), list[FrameSummary](), list[FrameSummary]()

    def look(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if found or not is_user_file(frame.f_code.co_filename):
            return None
        if draws_so_far() != before:
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
    return describe(found[0]) if found else "(no line of user code)"


def generator_states(named: Iterable[tuple[str, object]]) -> dict[str, str]:
    """The present states of those of some values, given with their names, that are generators of Python or numpy."""
    found: dict[str, str] = {}
    for name, value in named:
        if isinstance(value, random.Random):
            found[name] = str(value.getstate())
        elif isinstance(value, np.random.Generator):
            found[name] = str(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            found[name] = str(value.get_state())
    return found
