"""What process 0 makes of how all processes stand: who has failed, who waits in vain, and where all stop.

It sees what each process says of itself, and says one thing to all: there are no sockets here, and no threads.
"""

import dataclasses
import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)

DIED = "it has died (killed, or out of memory?)"
"""What is said of a process that is gone without a word."""

TOGETHER = (
    "All processes make the same calls: none under `if jax.process_index() == 0`, and all get equally many batches."
)
"""What a user can do about processes that do not come together."""


@dataclasses.dataclass(frozen=True)
class Times:
    """How long processes wait for each other, in seconds; each is read from the environment, as `TORCH_SHARD_SILENT_S`.

    Attributes:
        beat: From one sign of life to the next.
        silent: A process that gives none for so long counts as gone.
        grace: A process whose peer has failed has so long to come back from what it waits for.
        notice: Process 0 says this often that others wait for one.
        wait: So long they wait for one that is alive.
        connect: To reach process 0 at the beginning.
    """

    beat: float = 0.5
    silent: float = 25.0
    grace: float = 5.0
    notice: float = 30.0
    wait: float = 1800.0
    connect: float = 30.0

    @classmethod
    def of_environment(cls) -> "Times":
        """Give the defaults, and what the environment says otherwise."""
        names = (field.name for field in dataclasses.fields(cls))
        given = {name: os.environ.get(f"TORCH_SHARD_{name.upper()}_S") for name in names}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


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
    asks: dict[int, str] = dataclasses.field(default_factory=dict)
    stands: dict[int, int | None] = dataclasses.field(default_factory=dict)
    misses: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class News:
    """What all processes are told.

    Attributes:
        failed: Why, by process, in the order in which it was seen.
        ended: How, by process.
        asked: Who asks for the stop of a loop, and why, by its number; until it is known where, all stand still.
        stops: The position before which all stop; None where one has left the loop already.
    """

    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    asked: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    stops: dict[int, int | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An exchange that cannot be, since some processes do not come to it.

    Attributes:
        why: For those that wait.
        places: Where they wait: for what, after how many programs. Who comes later from another place has not missed
            this call, but was not to make it.
    """

    why: str
    places: list[tuple[str, int]]


class Judge:
    """Process 0's view of a job.

    Attributes:
        news: For all.
        refused: By number, exchanges that cannot be.
    """

    def __init__(self, num: int, times: Times) -> None:
        self.news, self.refused = News(), dict[int, Refusal]()
        self._times = times
        self._seen = [Status() for _ in range(num)]
        self._heard, self._since = [0.0] * num, [0.0] * num  # of each: its last sign of life; the begin of its wait
        self._last = 0.0

    def look(self, statuses: Sequence[Status], now: float) -> None:
        """Take what all processes say at this time, in seconds."""
        elapsed = now - self._last
        if elapsed > self._times.silent / 2:  # the first time; or this host itself stood
            self._heard = [now] * len(statuses)
        self._last = now
        for rank, (before, status) in enumerate(zip(self._seen, statuses, strict=True)):
            if status.count != before.count:
                self._heard[rank] = now
            if status.waits != before.waits:
                self._since[rank] = now
            if status.over is not None:
                kind, why = status.over
                self._is_over(rank, kind, why, status)
            elif now - self._heard[rank] > self._times.silent:
                self._is_over(rank, "failed", silent_for(self._times.silent), status)
        for rank in {missed for status in statuses for missed in status.misses}:
            self._is_over(rank, "failed", DIED, statuses[rank])
        self._seen = list(statuses)
        self._judge_stops()
        self._judge_waits(now, elapsed)

    def _gone(self, rank: int) -> str | None:
        return self.news.failed.get(rank) or self.news.ended.get(rank)

    def _is_over(self, rank: int, kind: str, why: str, status: Status) -> None:
        if self._gone(rank) is not None:
            return
        if kind == "ended":
            self.news.ended[rank] = why
        else:
            self.news.failed[rank] = f"{why} (last seen {status.where})"

    def _judge_stops(self) -> None:
        """Where all stop: where the farthest is; nowhere, if one is not in the loop any more."""
        for rank, status in enumerate(self._seen):
            for loop, reason in status.asks.items():
                self.news.asked.setdefault(loop, (rank, reason))
        for loop in self.news.asked.keys() - self.news.stops.keys():
            said = [status.stands[loop] for status in self._seen if loop in status.stands]
            if len(said) == len(self._seen) or self.news.failed or self.news.ended:
                positions = [position for position in said if position is not None]
                self.news.stops[loop] = max(positions) if len(positions) == len(self._seen) else None

    def _judge_waits(self, now: float, elapsed: float) -> None:
        advice = "" if self.news.failed else f" {TOGETHER}"
        waiting = {status.waits for status in self._seen if status.waits is not None}
        for number, subject, patience in {waits[0]: waits for waits in waiting}.values():
            here = [rank for rank, status in enumerate(self._seen) if status.waits and status.waits[0] == number]
            missing = [rank for rank in range(len(self._seen)) if rank not in here]
            if not missing or number in self.refused:
                continue
            waited = now - max(self._since[rank] for rank in here)
            reason = self._in_vain(missing, self._seen[here[0]].runs)
            if reason is None and waited > patience:
                reason = f"{processes(missing)} did not come within {patience:.0f} s"
            if reason is not None:
                why = f"the processes do not come together: {reason}. {self._standing()}{advice}"
                waiting_there = [status for status in self._seen if status.waits and status.waits[0] == number]
                places = [(status.waits[1], status.runs) for status in waiting_there if status.waits]
                self.refused[number] = Refusal(why, places)
            elif waited // self._times.notice > max(0.0, waited - elapsed) // self._times.notice:
                text = "%s: for %.0f s this waits for %s. %s"
                logger.warning(text, subject, waited, processes(missing), self._standing())

    def _in_vain(self, missing: list[int], runs: int) -> str | None:
        """Why those that have not come never will, if others have begun so many programs."""
        for rank in missing:
            if (over := self._gone(rank)) is not None:
                return f"process {rank} will not come: {over}"
            if self._seen[rank].runs > runs:
                return f"process {rank} has gone on without it"
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
