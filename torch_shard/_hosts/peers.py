"""What a process tells the others of its job, and hears of them: agreements with an end, and news of failures.

It needs no collective of XLA, which would wait forever where one process does not come. Process 0 has a
`torch.distributed.TCPStore`. One thread of each process talks with it, and nobody else, so that the program never waits
for the store itself: it puts down how this process stands, takes what process 0 makes of that (`judge.py`), and carries
what is exchanged. Values are data (`data.py`), of which nothing is executed.
"""

import os
import re
import sys
import threading
import time
from typing import Any, Protocol

import jax
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torch_shard._common.caller import caller
from torch_shard._hosts.data import pack, unpack
from torch_shard._hosts.judge import TOGETHER, Judge, News, Status, standing, waits_in
from torch_shard._hosts.neighbours import Neighbours
from torch_shard._hosts.times import Times

STATUS = 75
"""With which a process ends whose peer has failed: EX_TEMPFAIL of sysexits.h, "try again"."""
LOST = "the connection to it is lost (killed, or out of memory?)"


class PeerError(RuntimeError):
    """Another process has failed, or does not come: what this one waits for will never be."""


class Loop(Protocol):
    """A loop that can be stopped at one step in all processes; see `stopping.py`."""

    number: int
    wanted: str | None
    reason: tuple[int, str] | None

    def pause(self) -> int:
        """Say how far it is, and let it go no further until `resume_until`."""
        ...

    def resume_until(self, at: int | None, rank: int, reason: str) -> None:
        """Go on, to this position."""
        ...


class _Exchange:
    """What this process gives, for which it waits for the others."""

    def __init__(self, number: int, content: bytes) -> None:
        self.number, self.content, self.answer = number, content, b""
        self.is_given, self.is_done = False, threading.Event()


class Peers:
    """The other processes of a job, as one of them knows them.

    Attributes:
        status: How this one stands, as the others are told.
        failure: Which process has failed, and how; None while none has.
        ended: Those that have ended in order.
        failed: Whether this one has told the others that it has.
        told: Whether the program knows that a process has failed: it has got the error.
        dying: Whether an error that nobody caught ends this one.
        saved: Whether all have stopped at one step, so that it waits for nobody any more.
        running: What the last program gives, perhaps not yet computed.
        loop: The loop that is under way.
        heard: When the store gave the last answer.
        closing: Whether this process is at its orderly end.
        exit_at: When it is ended, where its end is hopeless, and with which status.
    """

    def __init__(self, store: TCPStore, prefix: str, neighbours: Neighbours, times: Times) -> None:
        self.rank, self.num, self.times = neighbours.rank, neighbours.num, times
        self.status, self.patience = Status(), times.wait
        self.failure: tuple[int, str] | None = None
        self.ended: dict[int, str] = {}
        self.failed = self.told = self.dying = self.saved = self.closing = False
        self.running: jax.Array | None = None
        self.loop: Loop | None = None
        self.heard = time.monotonic()
        self.exit_at: tuple[float, int] | None = None
        self._store: Any = store  # whose annotations have text alone, where it takes bytes
        self._prefix, self._neighbours = prefix, neighbours
        self._judge = Judge(self.num, times) if self.rank == 0 else None
        self._number, self._one_at_a_time = 0, threading.Lock()
        self._exchange: _Exchange | None = None
        self._awake, self._is_new, self._over_is_said = threading.Event(), True, False
        self._thread = threading.Thread(target=self._talk, name="torch_shard peers", daemon=True)
        self._thread.start()

    # ---- what the program calls ----

    def exchange(self, data: bytes, subject: str) -> list[bytes]:
        """Bring together what each process gives, in order."""
        with self._one_at_a_time:
            self.check()
            self._number += 1
            own = _Exchange(self._number, pack([subject, self.status.runs, data]))
            self.status.waits = (own.number, subject, self.patience)
            self._exchange = own
            self._awake.set()
            try:
                while not own.is_done.wait(0.2):
                    self.check()
                    if 0 in self.ended:  # which would say of others that they do not come
                        raise PeerError(f"{caller()}: process 0 will not come: {self.ended[0]}")
            finally:
                self.status.waits = self._exchange = None
        kind, found = unpack(own.answer)
        if kind == "error":
            self.told = self.told or self.failure is not None
            raise PeerError(f"{caller()}: {found}")
        return found

    def check(self) -> None:
        """Raise if another process has failed."""
        if self.failure is not None:
            self.told = True
            raise PeerError(f"{caller()}: process {self.failure[0]} failed: {self.failure[1]}")

    def ask_stop(self, loop: int, reason: str) -> None:
        """Ask for a stop of a loop in all processes."""
        if str(loop) not in self.status.asks:
            self.status.asks = {**self.status.asks, str(loop): reason}
            self._say()

    def fail(self, error: BaseException) -> None:
        """Let all others know that this process has failed, and will come to nothing more.

        An error of XLA may tell of a connection to a process that is gone: then it is known first which one it is.
        """
        if isinstance(error, jax.errors.JaxRuntimeError):
            is_of_peer = re.search("(?i)connection|socket|peer|remote|gloo|nccl", str(error))
            until = time.monotonic() + (self.times.silent + 2 * self.times.beat if is_of_peer else 1.0)
            while self.failure is None and time.monotonic() < until:
                time.sleep(0.05)
        self.told = self.failed = True
        self.status.over = self.status.over or ("failed", describe(error))
        self._say()

    def leave(self) -> None:
        """Let all others know that this process ends in order; where that is hopeless, end it soon all the same."""
        if self.closing:
            return
        self.status.over = self.status.over or ("ended", "it came to its end")
        self._say()
        until = time.monotonic() + 1.0
        while not self._over_is_said and time.monotonic() < until:
            time.sleep(0.01)
        if self.failed or self.failure is not None:
            # JAX's own end waits for all processes, minutes long
            self.exit_at = time.monotonic() + self.times.grace, 1 if self.failed else STATUS
        self.close()

    def close(self) -> None:
        """End the thread, which the end of Python must not meet within the store."""
        self.closing = True
        self._awake.set()
        self._thread.join(2.0)

    def _say(self) -> None:
        self._is_new = True
        self._awake.set()

    # ---- the thread that talks with the store ----

    def _talk(self) -> None:
        last, pause = 0.0, 0.001
        try:
            while not self.closing:
                self._awake.wait(self.times.beat if self._exchange is None else pause)
                self._awake.clear()
                now = time.monotonic()
                if self._is_new or now - last >= self.times.beat:
                    self._is_new, last = False, now
                    self._beat(now)
                pause = min(2 * pause, 0.05) if self._carry() else 0.001
                self.heard = time.monotonic()
        except Exception as error:  # process 0 is gone, and the store with it
            if not self.closing and 0 not in self.ended:
                self.failure = self.failure or (0, f"{LOST}: {type(error).__name__}")
                # JAX may end us any moment
                os.write(2, "torch_shard: process {} failed: {}\n".format(*self.failure).encode())

    def _beat(self, now: float) -> None:
        if self.loop is not None and self.loop.wanted is not None:
            self.ask_stop(self.loop.number, self.loop.wanted)
        self.status.count += 1
        self.status.misses = self._neighbours.gone()
        is_over = self.status.over is not None
        self._store.set(self._key("of", self.rank), self.status.text())
        if self._judge is None:
            self._take(News.of_text(self._store.get(self._key("news"))))
            self._over_is_said = is_over
            return
        keys = [self._key("of", rank) for rank in range(self.num)]
        self._judge.look([Status.of_text(text) for text in self._store.multi_get(keys)], now)
        self._store.set(self._key("news"), self._judge.news.text())
        while self._judge.refused:
            number, why = self._judge.refused.popitem()
            self._store.compare_set(self._key("exchange", number, "all"), "", pack(["error", why]))
        self._take(self._judge.news)
        self._over_is_said = is_over

    def _take(self, news: News) -> None:
        for rank, how in news.failed.items():
            if int(rank) != self.rank:
                self.failure = self.failure or (int(rank), how)
        self.ended = {int(rank): how for rank, how in news.ended.items()}
        for number, stop in news.stops.items():
            loop = self.loop if self.loop is not None and str(self.loop.number) == number else None
            if number not in self.status.stands:
                self.status.stands[number] = None if loop is None else loop.pause()
                self._say()
            if stop.decided and loop is not None and loop.reason is None:
                loop.resume_until(stop.at, stop.rank, stop.reason)

    def _carry(self) -> bool:
        """Bring what this process gives, and take what all give if it is there; whether it waits for that."""
        own = self._exchange
        if own is None or own.is_done.is_set():
            return False
        place = "exchange", own.number
        if not own.is_given:
            own.is_given = True
            self._store.set(self._key(*place, self.rank), own.content)
            if self._store.add(self._key(*place, "came"), 1) == self.num:
                self._store.compare_set(self._key(*place, "all"), "", self._together(own.number))
        if not self._store.check([self._key(*place, "all")]):
            return True
        own.answer = self._store.get(self._key(*place, "all"))
        if self._store.add(self._key(*place, "read"), 1) == self.num:
            for part in (*range(self.num), "came", "all", "read"):
                self._store.delete_key(self._key(*place, part))
        own.is_done.set()
        return False

    def _together(self, number: int) -> bytes:
        """What all processes give, or that they are not at the same place."""
        texts = self._store.multi_get([self._key("exchange", number, rank) for rank in range(self.num)])
        given = [unpack(text) for text in texts]
        if len({(subject, runs) for subject, runs, _ in given}) == 1:
            return pack(["result", [data for *_, data in given]])
        found = standing([waits_in(subject, runs) for subject, runs, _ in given])
        return pack(
            ["error", f"the processes do not come together: they are not at the same place. {found} {TOGETHER}"]
        )

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def most_each(num: int) -> int:
    """Bytes that each of some processes may give in an exchange, so that one value holds what all give."""
    return min(1 << 20, (1 << 22) // num)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def flush_streams() -> None:
    """Write out what was printed, if that takes no second."""
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
