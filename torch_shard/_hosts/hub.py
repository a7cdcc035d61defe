"""The middle of the channel, in process 0: brings together what processes give, and judges who is late or gone."""

import asyncio
import dataclasses
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

from torch_shard._hosts.background import Background, replace_descriptor
from torch_shard._hosts.data import pack
from torch_shard._hosts.wire import LIMIT, Schema, Times, Wire, WireError, answer

MESSAGES: Schema = {
    "beat": (int, str),  # number of programs, where it stands
    "exchange": (int, str, int, bytes, float),  # number, subject, number of programs, data, patience
    "over": (str, str, str),  # failed or ended, why, where it stands
    "stop": (int, str),  # loop, reason
    "in loop": (int, int | None),  # loop, position
}
"""What the hub takes; `channel.py` has what it says."""

_STRANGERS = 64
"""Connections that have not proved themselves, beyond those of processes; the oldest makes room for another."""
_REPORTED = 8
"""Rejected connections that are told of."""
_LONGEST = 2000
"""Characters that are kept of a text."""


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
        over: Why it is not waited for any more.
    """

    wire: Wire | None = None
    heard: float = math.inf
    runs: int = 0
    where: str = "at its beginning"
    gives: _Exchange | None = None
    over: str | None = None


class Hub:
    """Serves the processes of a job, each of which connects once.

    All of it runs in one event loop, in which nothing waits for a process: each connection is served beside the
    others, and what is sent is queued, with a deadline for each process.
    """

    def __init__(self, num: int, secret: bytes, times: Times, sockets: Sequence[socket.socket]) -> None:
        self._peers = [_Peer() for _ in range(num)]
        self._secret, self._times, self._sockets = secret, times, sockets
        self._stops: dict[int, dict[int, int | None]] = {}  # by loop: where each process stands in it
        self._reasons: dict[int, tuple[int, str]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came
        self._servers: list[asyncio.Server] = []
        self._num_rejected = 0
        self._background = Background("torch_shard hub")
        self._background.run(self._listen())
        self._background.start(self._judge())

    async def _listen(self) -> None:
        for each in self._sockets:
            self._servers.append(await asyncio.start_server(self._admit, sock=each, backlog=len(self._peers) + 64))

    @property
    def _wires(self) -> list[Wire]:
        """To the processes that have come."""
        return [peer.wire for peer in self._peers if peer.wire is not None]

    def close(self) -> None:
        """Let go of all connections."""
        self._background.run(self._hang_up())
        self._background.close()

    async def _hang_up(self) -> None:
        for server in self._servers:
            server.close()
        for each in [*self._wires, *self._strangers]:
            each.close()

    def abandon(self) -> None:
        """Let go of all connections in a forked process, where they stay the parent's."""
        self._background.abandon()
        for each in self._sockets:
            replace_descriptor(each.fileno())
        for wire in self._wires:
            wire.abandon()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: a process of this job, or an unknown client, which does no harm to others."""
        if len(self._strangers) >= len(self._peers) + _STRANGERS:
            next(iter(self._strangers)).transport.abort()
        self._strangers[writer] = None
        try:
            wire, rank = await answer(reader, writer, self._secret, self._times)
            if rank >= len(self._peers) or self._peers[rank].wire is not None:
                wire.close()
                raise ConnectionError(f"connection rejected: process {rank} has come already, or is not of this job")
        except OSError as error:
            self._report(writer, error)
            return
        finally:
            del self._strangers[writer]
        self._peers[rank].wire, self._peers[rank].heard = wire, time.monotonic()
        if len(self._wires) == len(self._peers):
            for server in self._servers:
                server.close()
        await self._serve(rank, wire)

    def _report(self, writer: asyncio.StreamWriter, error: OSError) -> None:
        """Let process 0 log a rejected connection, which this thread must not wait for."""
        self._num_rejected += 1
        if self._num_rejected <= _REPORTED and (wire := self._peers[0].wire) is not None:
            host = (writer.get_extra_info("peername") or ["?"])[0]
            wire.send("notice", f"{error} (from {host})")

    async def _serve(self, rank: int, wire: Wire) -> None:
        try:
            while True:
                kind, *given = await wire.receive(MESSAGES)
                self._peers[rank].heard = time.monotonic()
                self._take(rank, kind, *given)
        except WireError as error:
            self._is_over(rank, "failed", str(error))
        finally:
            wire.close()

    def _take(self, rank: int, kind: str, *parts: Any) -> None:
        peer = self._peers[rank]
        given: list[Any] = [part[:_LONGEST] if isinstance(part, str) else part for part in parts]
        if kind == "beat":
            peer.runs, peer.where = given
        elif kind == "exchange":
            if len(given[3]) > most_each(len(self._peers)):
                raise WireError(f"connection closed: {len(given[3])} bytes are too many for an exchange")
            peer.gives = _Exchange(*given, since=time.monotonic())
            peer.runs = peer.gives.runs
            self._settle()
        elif kind == "over":
            over, reason, peer.where = given
            self._is_over(rank, "ended" if over == "ended" else "failed", reason)
        elif kind == "stop":
            loop, reason = given
            if loop not in self._stops:
                self._stops[loop], self._reasons[loop] = {}, (rank, reason)
                self._tell("where in loop", loop)
        elif kind == "in loop" and given[0] in self._stops:
            loop, position = given
            self._stops[loop][rank] = position
            self._decide(loop)

    def _tell(self, *message: object) -> None:
        content = pack(list(message))
        for wire in self._wires:
            wire.send_packed(content)

    def _is_over(self, rank: int, kind: str, text: str) -> None:
        """Note that this process is not waited for any more: it has `failed`, or `ended`."""
        peer = self._peers[rank]
        if peer.over is not None:
            return
        peer.over = text
        where = "" if kind == "ended" else f" (last seen {peer.where})"
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

    async def _judge(self) -> None:
        last = time.monotonic()
        while any(peer.over is None for peer in self._peers):
            await asyncio.sleep(self._times.beat)
            now = time.monotonic()
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
        packed: dict[int, bytes] = {}  # by number: one, but where they are not at the same place
        for rank, given in here.items():
            self._peers[rank].gives = None
            content = packed.get(given.number) or packed.setdefault(given.number, pack([kind, given.number, what]))
            wire = self._peers[rank].wire
            assert wire is not None
            wire.send_packed(content)


def most_each(num: int) -> int:
    """Bytes that each of some processes may give in an exchange, so that one message holds what all give."""
    return min(1 << 20, LIMIT // (4 * num))


def _processes(ranks: list[int]) -> str:
    """Name some processes, the first ones of many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def silent_for(seconds: float) -> str:
    """Say of a process that nothing was heard of it."""
    return f"no sign of life for {seconds:.0f} s (stopped, or its host is gone)"
