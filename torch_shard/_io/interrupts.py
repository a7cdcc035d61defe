"""Ctrl-C and the end of the interpreter, neither of which may cut a checkpoint short."""

import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Generator

logger = logging.getLogger(__name__)

_WRITING: weakref.WeakSet[concurrent.futures.Future[None]] = weakref.WeakSet()


@contextlib.contextmanager
def uninterrupted() -> Generator[None, None, None]:
    """Hold `SIGINT` back within the `with`; it comes at its end. In other threads than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def finish_at_exit(writing: concurrent.futures.Future[None]) -> None:
    """Let this be done before the interpreter ends; an error that nobody has asked for by then is logged."""
    _listen()
    _WRITING.add(writing)


@functools.cache
def _listen() -> None:
    # The only hook that comes before Python stops taking work for threads, which orbax still has to give them; `atexit`
    # comes after that. `concurrent.futures` uses it too, earlier, so that its own is called after this one.
    threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]
    os.register_at_fork(after_in_child=_WRITING.clear)  # their threads are the parent's


def _finish_all() -> None:
    writing = list(_WRITING)
    if writing and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it was heard: the interpreter ends
    for future in writing:
        if (error := future.exception()) is not None:
            logger.error("A checkpoint could not be written: %s", error)
