"""The middle of the channel, in process 0: brings together what processes give, and judges who is late or gone."""

import contextlib
import dataclasses
import math
import socket
import threading
import time
from typing import Any

from torch_shard._hosts.wire import Times, Wire, answer


@dataclasses.dataclass
class _Exchange:
    """What one process gives, for which it waits for the others."""

    number: int
    subject: str
    runs: int
    data: bytes
    patience: float
    since: float
    notices: int = 0

    @property
    def place(self) -> tuple[int, str, int]:
        return self.number, self.subject, self.runs


@dataclasses.dataclass
class _Peer:
    """What the hub knows of a process.

    Attributes:
        heard: When it gave the last sign of life.
        runs: Number of programs over all processes that it has begun.
        where: Where it stands, in words.
        gives: What it waits with.
        over: Why nobody need wait for it.
    """

    wire: Wire | None = None
    heard: float = math.inf
    runs: int = 0
    where: str = "at its beginning"
    gives: _Exchange | None = None
    over: str | None = None


class Hub:
    """Serves the processes of a job, each of which calls once.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, num: int, secret: bytes, times: Times) -> None:
        self._peers = [_Peer() for _ in range(num)]
        self._secret, self._times = secret, times
        self._lock = threading.RLock()
        self._stops: dict[int, dict[int, int | None]] = {}  # by loop: where each process stands in it
        self._reasons: dict[int, tuple[int, str]] = {}
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=num, dualstack_ipv6=dual)
        self.port: int = self._server.getsockname()[1]
        for work in (self._accept, self._judge):
            threading.Thread(target=work, name="torch_shard hub", daemon=True).start()

    @property
    def wires(self) -> list[Wire]:
        """To the processes that have called."""
        return [peer.wire for peer in self._peers if peer.wire is not None]

    def _accept(self) -> None:
        while any(peer.wire is None for peer in self._peers):
            with contextlib.suppress(OSError, IndexError):
                wire, rank = answer(self._server.accept()[0], self._secret, 3.0)
                with self._lock:
                    self._peers[rank].wire, self._peers[rank].heard = wire, time.monotonic()
                threading.Thread(target=self._serve, args=(rank, wire), name="torch_shard hub", daemon=True).start()
        self._server.close()

    def _serve(self, rank: int, wire: Wire) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message = wire.receive()
                with self._lock:
                    self._peers[rank].heard = time.monotonic()
                    self._take(rank, *message)
        with self._lock:
            if self._peers[rank].over is None:
                self._is_over(rank, "failed", "it is gone without a word (killed, or out of memory?)")

    def _take(self, rank: int, kind: str, *given: Any) -> None:
        peer = self._peers[rank]
        if kind == "beat":
            peer.runs, peer.where = given
        elif kind == "exchange":
            peer.gives = _Exchange(*given, since=time.monotonic())
            peer.runs = peer.gives.runs
            self._settle()
        elif kind == "over":
            peer.where = given[2]
            self._is_over(rank, *given[:2])
        elif kind == "stop":
            loop, reason = given
            if loop not in self._stops:
                self._stops[loop], self._reasons[loop] = {}, (rank, reason)
                self._tell("where in loop", loop)
        elif kind == "in loop":
            loop, position = given
            self._stops[loop][rank] = position
            self._decide(loop)

    def _tell(self, *message: object) -> None:
        for wire in self.wires:
            wire.send(*message)

    def _is_over(self, rank: int, kind: str, text: str) -> None:
        """Note that nobody need wait for this process: it has `failed`, or `ended`."""
        peer = self._peers[rank]
        if peer.over is not None:
            return
        peer.over = text
        where = "" if kind == "ended" else f" (When it was last heard of, it was {peer.where}.)"
        self._tell(kind, rank, text + where)
        self._settle()
        for loop in self._stops:
            self._decide(loop)

    def _decide(self, loop: int) -> None:
        """Say where all stop, once each has said how far it is; nowhere, if one is not in the loop any more."""
        found = self._stops[loop]
        if len(found) < len(self._peers) and not any(peer.over for peer in self._peers):
            return
        standing = [found.get(rank) for rank in range(len(self._peers))]
        numbers = [position for position in standing if position is not None]
        at = max(numbers) if len(numbers) == len(self._peers) else None
        self._tell("stop", loop, at, *self._reasons[loop])

    def _judge(self) -> None:
        last = time.monotonic()
        while any(peer.over is None for peer in self._peers):
            time.sleep(self._times.beat)
            now = time.monotonic()
            with self._lock:
                if now - last > self._times.silent / 2:  # this process itself was stopped, or the whole host
                    for peer in self._peers:
                        peer.heard += now - last
                last = now
                for rank, peer in enumerate(self._peers):
                    if peer.over is None and now - peer.heard > self._times.silent:
                        self._is_over(rank, "failed", silent_for(self._times.silent))
                self._settle()
                self._tell("beat")

    # ---- exchanges ----

    def _settle(self) -> None:
        """Answer those that wait, if all have come, or if one cannot come any more."""
        here = {rank: peer.gives for rank, peer in enumerate(self._peers) if peer.gives is not None}
        if not here:
            return
        if len({each.place for each in here.values()}) > 1:
            self._refuse(here, "they are not at the same place")
        elif len(here) == len(self._peers):
            found = [here[rank].data for rank in range(len(self._peers))]
            self._answer(here, "result", found)
        elif (reason := self._in_vain(here)) is not None:
            self._refuse(here, reason)

    def _in_vain(self, here: dict[int, _Exchange]) -> str | None:
        """Say why waiting for those that have not come is in vain."""
        missing = [rank for rank in range(len(self._peers)) if rank not in here]
        one = next(iter(here.values()))
        for rank in missing:
            peer = self._peers[rank]
            if peer.over is not None:
                return f"process {rank} will not come: {peer.over}"
            if peer.runs > one.runs:
                return f"process {rank} has gone on without it"
        now = time.monotonic()
        waited = now - max(each.since for each in here.values())
        if waited > one.patience:
            return f"{_processes(missing)} did not come within {one.patience:.0f} s"
        if waited > self._times.notice * (one.notices + 1):
            one.notices += 1
            text = f"{one.subject}: for {waited:.0f} s this waits for {_processes(missing)}. {self._standing(here)}"
            self._peers[next(iter(here))].wire.send("notice", text)  # pyright: ignore[reportOptionalMemberAccess]
        return None

    def _refuse(self, here: dict[int, _Exchange], reason: str) -> None:
        self._answer(here, "error", f"the processes do not come together: {reason}. {self._standing(here)}")

    def _standing(self, here: dict[int, _Exchange]) -> str:
        """Say where each process stands, those alike together."""
        groups: dict[str, list[int]] = {}
        for rank, peer in enumerate(self._peers):
            given = here.get(rank)
            where = f"waits in {given.subject} (after {given.runs} programs)" if given else f"is {peer.where}"
            groups.setdefault(f"has ended: {peer.over}" if peer.over else where, []).append(rank)
        return " ".join(f"{_processes(ranks).capitalize()} {where}." for where, ranks in groups.items())

    def _answer(self, here: dict[int, _Exchange], kind: str, what: object) -> None:
        for rank, given in here.items():
            self._peers[rank].gives = None
            wire = self._peers[rank].wire
            assert wire is not None
            wire.send(kind, given.number, what)


def _processes(ranks: list[int]) -> str:
    """Name some processes, the first ones of many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def silent_for(seconds: float) -> str:
    """Say of a process that nothing was heard of it."""
    return f"it has given no sign of life for {seconds:.0f} s (stopped, or its host is gone)"
