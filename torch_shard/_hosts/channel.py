"""The channel between the processes of a job: agreements with an end, news of failures, and where each stands.

It needs no collective of XLA, which would wait for ever where one process does not come. Process 0 serves it; its
address and a secret are made known by one broadcast, at the first need.
"""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import atexit
import contextlib
import functools
import json
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from torch_shard._common.caller import caller
from torch_shard._hosts.hub import Hub
from torch_shard._hosts.wire import Times, Wire, call

logger = logging.getLogger(__name__)

_LENGTH = 1024
"""Bytes of what is made known at the beginning."""


STATUS = 75
"""With which a process ends whose peer has failed: EX_TEMPFAIL of sysexits.h, "try again"."""


class PeerError(RuntimeError):
    """Another process has failed, or does not come: what this one waits for will never be."""


class Loop(Protocol):
    """A loop that can be stopped at one step in all processes; see `stopping.py`."""

    number: int
    wanted: str | None

    def stand(self) -> int:
        """Say how far it is, and let it go no further until `decide`."""
        ...

    def decide(self, at: int | None, rank: int, reason: str) -> None:
        """Go on, to this position."""
        ...


class Channel:
    """The end of the channel that one process holds.

    Attributes:
        runs: Number of programs over all processes that this one has begun.
        where: Where it stands, in words: "it is ...".
        failure: Which process has failed, and how; None while none has.
        ended: Those that have ended in order.
        failed: Whether this one has.
        told: Whether the main thread knows that a process has failed.
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
        self.failed = self.told = self.saved = self.closing = False
        self.running: jax.Array | None = None
        self.loop: Loop | None = None
        self.heard = time.monotonic()
        self.patience = times.wait
        self._number, self._one_at_a_time = 0, threading.Lock()
        self._answers: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="torch_shard channel", daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                kind, *given = self.wire.receive()
                self.heard = time.monotonic()
                self._take(kind, given)
        if not self.closing and 0 not in self.ended:
            self.failure = self.failure or (0, "it is gone without a word (killed, or out of memory?)")
            os.write(
                2, "torch_shard: process {} failed: {}\n".format(*self.failure).encode()
            )  # JAX may end us any moment

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
            self.wire.send("in loop", given[0], None if loop is None else loop.stand())
        elif kind == "stop" and self.loop is not None and self.loop.number == given[0]:
            self.loop.decide(*given[1:])

    def exchange(self, data: bytes, subject: str) -> list[bytes]:
        """Bring together what each process gives, in order.

        Args:
            data: What this one gives.
            subject: What it is about; all must be about the same.

        Raises:
            PeerError: In every process that waits: another has failed, is elsewhere, or does not come.
        """
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
        """Raise if another process has failed.

        Raises:
            PeerError: It has.
        """
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
        if self.failed or self.failure is not None:
            # JAX's own end waits for all processes, minutes long
            end = threading.Timer(self.times.grace, lambda: os._exit(1 if self.failed else STATUS))
            end.daemon = True
            end.start()


def channel() -> Channel | None:
    """The channel of this job, opened by the first call, to which all processes must come; None of one process."""
    return _open() if jax.process_count() > 1 else None


def opened() -> Channel | None:
    """The channel of this job if it is open."""
    return _open() if _open.cache_info().currsize else None


@functools.cache
def _open() -> Channel:
    times = Times.of_environment()
    rank, num = jax.process_index(), jax.process_count()
    known, hub = b"", None
    if rank == 0:
        secret = secrets.token_bytes(16)
        hub = Hub(num, secret, times)
        known = json.dumps([secret.hex(), hub.port, _addresses()]).encode()
    block = np.zeros(_LENGTH, np.uint8)
    block[: len(known)] = np.frombuffer(known, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(block)).tobytes().rstrip(b"\0")
    secret, port, hosts = json.loads(told)
    wire, faults = _reach([(host, port) for host in hosts], bytes.fromhex(secret), rank, times.connect)
    reached = multihost_utils.process_allgather(np.array(wire is not None))
    if wire is None or not reached.all():
        missing = [process for process, came in enumerate(reached.tolist()) if not came]
        raise RuntimeError(
            f"{caller()}: processes {missing} do not reach process 0, over which the processes of a job agree, at "
            f"{', '.join(hosts)}, port {port}{': ' if faults else ''}{'; '.join(faults)}. Let the hosts of a job reach "
            "each other's ports, as PyTorch's and JAX's own coordinators need it too."
        )
    from torch_shard._hosts.watch import watch  # which needs the channel

    line = Channel(rank, wire, times)
    watch(line)
    atexit.register(line.leave)
    os.register_at_fork(after_in_child=functools.partial(_forget, line, hub))
    return line


def _forget(line: Channel, hub: Hub | None) -> None:
    """Leave the channel to the process from which this one was forked, and let its end be seen there."""
    line.closing = True
    for wire in [line.wire, *(hub.wires if hub is not None else [])]:
        wire.abandon()
    _open.cache_clear()


def _addresses() -> list[str]:
    """Addresses under which others may reach this host, the likeliest first."""
    found: list[str] = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # RFC 5737, 3849: nobody's
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as out:
            out.connect((far, 9))  # sends nothing, but chooses where it would leave from
            found.append(out.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname()[:200], "127.0.0.1"]))


def _reach(places: list[tuple[str, int]], secret: bytes, rank: int, timeout_s: float) -> tuple[Wire | None, list[str]]:
    """The first of these places where process 0 is, and what went wrong at the others."""
    faults: list[str] = []
    until = time.monotonic() + timeout_s
    for place in places[::-1] if rank == 0 else places:
        try:
            return call(place, secret, rank, max(1.0, (until - time.monotonic()) / 2)), []
        except OSError as error:
            faults.append(f"{place[0]}: {error}")
    return None, faults


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def flush_streams() -> None:
    """Write out what was printed, if that takes no second."""
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
