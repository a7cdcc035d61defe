"""Ctrl-C and the end of the interpreter, neither of which may cut a checkpoint short."""

import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Generator
from typing import Protocol


class Saver(Protocol):
    """Something that writes in the background."""

    def finish(self) -> None:
        """Wait until it has written, whatever came of it."""


_SAVERS: weakref.WeakSet[Saver] = weakref.WeakSet()


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


def finish_at_exit(saver: Saver) -> None:
    """Let it finish before the interpreter ends.

    Args:
        saver: Kept weakly; while it writes, its own thread holds it.
    """
    _listen()
    _SAVERS.add(saver)


@functools.cache
def _listen() -> None:
    # The only hook that comes before Python stops taking work for threads, which orbax still has to give them; `atexit`
    # comes after that. `concurrent.futures` uses it too, earlier, so that its own is called after this one.
    threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]
    os.register_at_fork(after_in_child=_SAVERS.clear)  # their threads are the parent's


def _finish_all() -> None:
    savers = list(_SAVERS)
    if savers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it was heard: the interpreter ends
    for saver in savers:
        saver.finish()
