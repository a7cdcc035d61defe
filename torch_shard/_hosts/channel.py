"""The end of the channel that one process holds: agreements with an end, news of failures, and where each stands.

It needs no collective of XLA, which would wait forever where one process does not come. `session.py` opens it, and
`hub.py` serves it in process 0.
"""

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from typing import Any, Protocol

import jax

from torch_shard._common.caller import caller
from torch_shard._hosts.wire import Schema, Times, Wire, WireError

logger = logging.getLogger(__name__)

MESSAGES: Schema = {
    "beat": (),
    "result": (int, list),  # number of the exchange, what each process gives
    "error": (int, str),  # number of the exchange, why it cannot be
    "notice": (str,),
    "failed": (int, str),  # process, how
    "ended": (int, str),  # process, how
    "where in loop": (int,),  # loop
    "stop": (int, int | None, int, str),  # loop, position, process that asked, reason
}
"""What a process takes from the hub; `hub.py` has what it says."""

STATUS = 75
"""With which a process ends whose peer has failed: EX_TEMPFAIL of sysexits.h, "try again"."""


class PeerError(RuntimeError):
    """Another process has failed, or does not come: what this one waits for will never be."""


class Loop(Protocol):
    """A loop that can be stopped at one step in all processes; see `stopping.py`."""

    number: int
    wanted: str | None

    def pause(self) -> int:
        """Say how far it is, and let it go no further until `resume_until`."""
        ...

    def resume_until(self, at: int | None, rank: int, reason: str) -> None:
        """Go on, to this position."""
        ...


class Channel:
    """The end of the channel that one process holds.

    Attributes:
        runs: Number of programs over all processes that this one has begun.
        where: Where it stands, in words: "it is ...".
        failure: Which process has failed, and how; None while none has.
        ended: Those that have ended in order.
        failed: Whether this one has told the others that it has.
        told: Whether the program knows that a process has failed: it has got the error.
        dying: Whether an error that nobody caught ends this one.
        saved: Whether all have stopped at one step, so that it waits for nobody any more.
        running: What the last program gives, perhaps not yet computed.
        loop: The loop that is under way.
        heard: When process 0 gave the last sign of life.
        closing: Whether this process is at its orderly end.
    """

    def __init__(self, rank: int, wire: Wire, times: Times) -> None:
        self.rank, self.wire, self.times = rank, wire, times
        self.runs, self.where = 0, "at its beginning"
        self.failure: tuple[int, str] | None = None
        self.ended: dict[int, str] = {}
        self.failed = self.told = self.dying = self.saved = self.closing = False
        self.running: jax.Array | None = None
        self.loop: Loop | None = None
        self.heard = time.monotonic()
        self.patience = times.wait
        self._number, self._one_at_a_time = 0, threading.Lock()
        self._answers: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        asyncio.run_coroutine_threadsafe(self._listen(), wire.loop)

    async def _listen(self) -> None:
        try:
            while True:
                kind, *given = await self.wire.receive(MESSAGES)
                self.heard = time.monotonic()
                self._take(kind, given)
        except WireError as error:
            if not self.closing and 0 not in self.ended:
                self.failure = self.failure or (0, str(error))
                # JAX may end us any moment
                os.write(2, "torch_shard: process {} failed: {}\n".format(*self.failure).encode())

    def _take(self, kind: str, given: list[Any]) -> None:
        if kind in ("result", "error"):
            self._answers.put((kind, *given))
        elif kind == "notice":
            logger.warning("%s", given[0])
        elif kind == "failed" and given[0] != self.rank:
            self.failure = self.failure or (given[0], given[1])
        elif kind == "ended":
            self.ended[given[0]] = given[1]
        elif kind == "where in loop":
            loop = self.loop if self.loop is not None and self.loop.number == given[0] else None
            self.wire.send("in loop", given[0], None if loop is None else loop.pause())
        elif kind == "stop" and self.loop is not None and self.loop.number == given[0]:
            self.loop.resume_until(*given[1:])

    def exchange(self, data: bytes, subject: str) -> list[bytes]:
        """Bring together what each process gives, in order."""
        with self._one_at_a_time:
            return self._exchange(data, subject)

    def _exchange(self, data: bytes, subject: str) -> list[bytes]:
        self.check()
        self._number += 1
        self.wire.send("exchange", self._number, subject, self.runs, data, self.patience)
        while True:
            try:
                kind, number, found = self._answers.get(timeout=0.2)
            except queue.Empty:
                self.check()
                continue
            if number != self._number:
                continue  # of one that was given up
            if kind == "error":
                self.told = self.told or self.failure is not None
                raise PeerError(f"{caller()}: {found}")
            return found

    def check(self) -> None:
        """Raise if another process has failed."""
        if self.failure is not None:
            self.told = True
            raise PeerError(f"{caller()}: process {self.failure[0]} failed: {self.failure[1]}")

    def fail(self, text: str) -> None:
        """Let all others know that this process has failed, and will come to nothing more."""
        self.told = self.failed = True
        self.wire.send("over", "failed", text, self.where)

    def leave(self) -> None:
        """Let all others know that this process ends in order; where that is hopeless, end it soon all the same."""
        if self.closing:
            return
        self.closing = True
        self.wire.send("over", "ended", "it came to its end", self.where)
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.wire.flush(), self.wire.loop).result(1.0)
        if self.failed or self.failure is not None:
            # JAX's own end waits for all processes, minutes long. A thread could not be started any more.
            status = 1 if self.failed else STATUS
            self.wire.loop.call_soon_threadsafe(self.wire.loop.call_later, self.times.grace, os._exit, status)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def flush_streams() -> None:
    """Write out what was printed, if that takes no second."""
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
