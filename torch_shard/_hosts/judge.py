"""What process 0 makes of how all processes stand: who has failed, who waits in vain, and where all stop.

It sees what each process says of itself, and says one thing to all: there are no sockets here, and no threads.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from torch_shard._hosts.times import Times

logger = logging.getLogger(__name__)

DIED = "it has died (killed, or out of memory?)"
"""What is said of a process that is gone without a word."""

TOGETHER = (
    "All processes make the same calls: none under `if jax.process_index() == 0`, and all get equally many batches."
)
"""What a user can do about processes that do not come together."""


@dataclasses.dataclass
class Status:
    """How a process stands, as it says itself.

    Attributes:
        count: A number that grows: its signs of life.
        runs: Number of programs over all processes that it has begun.
        where: Where it stands, in words: "it is ...".
        waits: In which exchange, for what, and how many seconds at most.
        over: "failed" or "ended", and why: it is not to be waited for any more.
        asks: Loops that it asks to stop, and why.
        stands: How far it is in loops that are to stop; None for one that it is not in.
        misses: Processes of its host that do not run any more.
    """

    count: int = 0
    runs: int = 0
    where: str = "at its beginning"
    waits: tuple[int, str, float] | None = None
    over: tuple[str, str] | None = None
    asks: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    stands: dict[str, int | None] = dataclasses.field(default_factory=dict[str, int | None])
    misses: list[int] = dataclasses.field(default_factory=list[int])

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: bytes) -> "Status":
        """From JSON."""
        found = json.loads(text)
        waits, over = found.pop("waits"), found.pop("over")
        return cls(**found, waits=tuple(waits) if waits else None, over=tuple(over) if over else None)


@dataclasses.dataclass
class Stop:
    """That a loop is to stop.

    Attributes:
        rank: The process that asked.
        reason: Why.
        decided: Whether it is known where; until then all stand still.
        at: The position before which all stop; None where one has left the loop already.
    """

    rank: int
    reason: str
    decided: bool = False
    at: int | None = None


@dataclasses.dataclass
class News:
    """What all processes are told.

    Attributes:
        failed: Why, by process, in the order in which it was seen.
        ended: How, by process.
        stops: By number of the loop.
    """

    failed: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    ended: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    stops: dict[str, Stop] = dataclasses.field(default_factory=dict[str, Stop])

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: bytes) -> "News":
        """From JSON."""
        found: dict[str, Any] = json.loads(text)
        stops = {loop: Stop(**stop) for loop, stop in found["stops"].items()}
        return cls(found["failed"], found["ended"], stops)


class Judge:
    """Process 0's view of a job.

    Attributes:
        news: For all.
        refused: By number, why exchanges cannot be; each is there once, for the caller to take.
    """

    def __init__(self, num: int, times: Times) -> None:
        self.news, self.refused = News(), dict[int, str]()
        self._was_refused = set[int]()
        self._times = times
        self._seen = [Status() for _ in range(num)]
        self._heard = [0.0] * num
        self._since = dict[int, float]()  # process: when it was first seen to wait where it waits
        self._notices = dict[int, int]()  # exchange: how often it was told of
        self._last = 0.0

    def look(self, statuses: Sequence[Status], now: float) -> None:
        """Take what all processes say at this time, in seconds."""
        if not self._last or now - self._last > self._times.silent / 2:  # the first time; or this host itself stood
            self._heard = [now] * len(statuses)
        self._last = now
        for rank, status in enumerate(statuses):
            before = self._seen[rank]
            if status.count != before.count:
                self._heard[rank] = now
            if status.waits != before.waits or rank not in self._since:
                self._since[rank] = now
            if status.over is not None:
                self._is_over(rank, *status.over, status)
            elif now - self._heard[rank] > self._times.silent:
                self._is_over(rank, "failed", silent_for(self._times.silent), status)
        for rank in {missed for status in statuses for missed in status.misses}:
            self._is_over(rank, "failed", DIED, statuses[rank])
        self._seen = list(statuses)
        self._judge_stops()
        self._judge_waits(now)

    def _gone(self, rank: int) -> str | None:
        return self.news.failed.get(str(rank)) or self.news.ended.get(str(rank))

    def _is_over(self, rank: int, kind: str, why: str, status: Status) -> None:
        if self._gone(rank) is None:
            found = self.news.ended if kind == "ended" else self.news.failed
            found[str(rank)] = why if kind == "ended" else f"{why} (last seen {status.where})"

    def _judge_stops(self) -> None:
        """Where all stop: where the farthest is; nowhere, if one is not in the loop any more."""
        for rank, status in enumerate(self._seen):
            for loop, reason in status.asks.items():
                self.news.stops.setdefault(loop, Stop(rank, reason))
        for loop, stop in self.news.stops.items():
            said = [status.stands[loop] for status in self._seen if loop in status.stands]
            if not stop.decided and (len(said) == len(self._seen) or self.news.failed or self.news.ended):
                positions = [position for position in said if position is not None]
                stop.at = max(positions) if len(positions) == len(self._seen) else None
                stop.decided = True

    def _judge_waits(self, now: float) -> None:
        waiting = {rank: status for rank, status in enumerate(self._seen) if status.waits is not None}
        numbers = {status.waits[0] for status in waiting.values() if status.waits}
        advice = "" if self.news.failed else f" {TOGETHER}"
        for number in numbers - self._was_refused:
            here = {rank: status for rank, status in waiting.items() if status.waits and status.waits[0] == number}
            if len(here) < len(self._seen) and (reason := self._in_vain(here, number, now)):
                self.refused[number] = f"the processes do not come together: {reason}. {self._standing()}{advice}"
                self._was_refused.add(number)

    def _in_vain(self, here: dict[int, Status], number: int, now: float) -> str | None:
        """Why waiting for those that have not come is in vain."""
        missing = [rank for rank in range(len(self._seen)) if rank not in here]
        one = next(iter(here.values()))
        assert one.waits is not None
        for rank in missing:
            if (over := self._gone(rank)) is not None:
                return f"process {rank} will not come: {over}"
            if self._seen[rank].runs > one.runs:
                return f"process {rank} has gone on without it"
        waited = now - max(self._since[rank] for rank in here)
        _, subject, patience = one.waits
        if waited > patience:
            return f"{processes(missing)} did not come within {patience:.0f} s"
        if waited > self._times.notice * (self._notices.get(number, 0) + 1):
            self._notices[number] = self._notices.get(number, 0) + 1
            text = "%s: for %.0f s this waits for %s. %s"
            logger.warning(text, subject, waited, processes(missing), self._standing())
        return None

    def _standing(self) -> str:
        found: list[str] = []
        for rank, status in enumerate(self._seen):
            over = self._gone(rank)
            where = f"is {status.where}" if status.waits is None else waits_in(status.waits[1], status.runs)
            found.append(where if over is None else f"has ended: {over}")
        return standing(found)


def waits_in(subject: str, runs: int) -> str:
    """Say where a process is that waits in an exchange."""
    return f"waits in {subject} (after {runs} programs)"


def standing(found: Sequence[str]) -> str:
    """Say what each process does, those alike together."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(found):
        groups.setdefault(text, []).append(rank)
    return " ".join(f"{processes(ranks).capitalize()} {text}." for text, ranks in groups.items())


def processes(ranks: Sequence[int]) -> str:
    """Name some processes, the first ones of many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def silent_for(seconds: float) -> str:
    """Say of a process that nothing was heard of it."""
    return f"no sign of life for {seconds:.0f} s (killed, stopped, or its host is gone)"
