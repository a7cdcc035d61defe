"""A thread that gives signs of life, and ends a process that would wait forever for one that has failed."""

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import jax

from torch_shard._hosts.channel import STATUS, Channel, describe, flush_streams
from torch_shard._hosts.hub import silent_for


def watch(line: Channel) -> None:
    """Begin to watch, and let the others know of an error that ends this process."""
    threading.Thread(target=_Watch(line).run, name="torch_shard watch", daemon=True).start()
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line.dying = True
        line.fail(describe(error))
        if isinstance(error, jax.errors.JaxRuntimeError) and _hears_of_failure(line):
            note = "torch_shard: process {} failed: {}".format(*line.failure or ())
            if note not in getattr(error, "__notes__", []):
                error.add_note(note)
        before(kind, error, where)

    sys.excepthook = tell


def _hears_of_failure(line: Channel) -> bool:
    """Wait a moment for the news that may explain an error of XLA: that a connection is closed."""
    until = time.monotonic() + 1.0
    while line.failure is None and time.monotonic() < until:
        time.sleep(0.05)
    return line.failure is not None


class _Watch:
    def __init__(self, line: Channel) -> None:
        self._line = line
        self._since: float | None = None  # when it was first seen that waiting may be in vain

    def run(self) -> None:
        line, times = self._line, self._line.times
        last = time.monotonic()
        while not line.closing:
            time.sleep(times.beat)
            line.wire.send("beat", line.runs, line.where)
            loop = line.loop
            if loop is not None and loop.wanted is not None:
                line.wire.send("stop", loop.number, loop.wanted)
                loop.wanted = None
            now = time.monotonic()
            if now - last > times.silent / 2:  # this process itself was stopped
                line.heard += now - last
            last = now
            if now - line.heard > times.silent and not line.ended:
                line.failure = line.failure or (0, silent_for(times.silent))
            if (found := self._in_vain()) is None:
                self._since = None
            elif self._since is None:
                self._since = now
            elif now - self._since > times.grace and not line.closing:
                self._end(found)

    def _in_vain(self) -> str | None:
        """Say what this process waits for in vain, as far as can be told.

        A program that has caught the error of a failed peer is left alone, whatever it does then: only `fit` reads what
        the devices will never give. JAX still ends it when it finds a process gone.
        """
        line = self._line
        running: Any = line.running  # whose is_ready JAX does not annotate
        computes = running is not None and not running.is_ready()
        if line.failure is not None:
            has_caught = line.told and not line.dying
            if (computes and line.loop is not None) or (not has_caught and (computes or not line.saved)):
                return f"process {line.failure[0]} failed: {line.failure[1]}"
        elif line.ended and computes:
            ended, how = next(iter(line.ended.items()))
            return f"process {ended} has ended ({how}) while others go on."
        return None

    def _end(self, reason: str) -> None:
        line = self._line
        flush_streams()
        end = f"exiting with status {STATUS}: lost a peer (process {line.rank} is {line.where})"
        os.write(2, f"\ntorch_shard: {reason}\ntorch_shard: {end}\n".encode())
        os._exit(STATUS)
