"""Compiling candidates within a time, the default first; where nothing was compiled, arithmetic says what to expect."""

import dataclasses
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from torch_shard._tune.cache import Cache, Measured
from torch_shard._tune.candidates import Candidate, Estimate

logger = logging.getLogger(__name__)

HOPELESS = 1.5
"""A candidate whose estimate, corrected by those of its kind, is this many times the best so far is not compiled."""

CAUTION = 2.0
"""An estimate counts so many times: what was not compiled is taken only where it should be twice as fast."""


@dataclasses.dataclass
class Search:
    """A search under way.

    Args:
        prepare: Reads the model in this thread, and gives what compiles a candidate in another one.
        estimates: The candidates, the default first: what a user takes who does not tune.
        cache: Asked first.
        deadline: By `time.monotonic`.
        limit: Bytes of one device; None if that is not known.
    """

    prepare: Callable[[Candidate], Callable[[], Measured]]
    estimates: dict[Candidate, Estimate]
    cache: Cache
    deadline: float
    limit: float | None = None

    def __post_init__(self) -> None:
        self.default = next(iter(self.estimates))
        self.found: dict[Candidate, Measured] = {}
        self.running: dict[Future[Measured], Candidate] = {}
        self.interrupted = False

    def run(self) -> None:
        """Compile until the time is over, nothing promising is left, or the user interrupts."""
        for candidate in self.estimates:
            if (known := self.cache.read(candidate)) is not None:
                self._take(candidate, known)
        try:
            while self._start_more() and self._wait():
                pass
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.interrupted = True

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate can run, as far as that is known."""
        found = self.found.get(candidate)
        return (found is None or not found.refused) and (self.limit is None or self.memory(candidate) <= self.limit)

    def memory(self, candidate: Candidate) -> float:
        """Bytes of one device: by the compiler, else by arithmetic, corrected by those that keep as much."""
        if candidate in self.found:
            return self.found[candidate].memory
        ratios = {c: found.memory / self.estimates[c].memory for c, found in self.found.items() if found.memory}
        alike = [ratio for c, ratio in ratios.items() if c.remat == candidate.remat]
        return self.estimates[candidate].memory * statistics.fmean(alike or [1.0])

    def seconds(self, candidate: Candidate) -> float:
        """Of a step: by the compiler, else by arithmetic, corrected by those most like it that were compiled."""
        if candidate in self.found:
            return self.found[candidate].seconds
        ratios = {c: found.seconds / self.estimates[c].seconds for c, found in self.found.items() if self.fits(c)}
        of_family = [ratio for c, ratio in ratios.items() if c.family == candidate.family]
        of_default = [ratios[self.default]] if self.default in ratios else list(ratios.values())
        return self.estimates[candidate].seconds * statistics.fmean(of_family or of_default or [1.0])

    def ranking(self) -> list[Candidate]:
        """All of them, the one to take first, and what does not fit last.

        What was not compiled counts as longer than arithmetic says, all but the default.
        """

        def rank(candidate: Candidate) -> tuple[bool, float]:
            caution = 1.0 if candidate in self.found or candidate == self.default else CAUTION
            return not self.fits(candidate), caution * self.seconds(candidate)

        return sorted(self.estimates, key=rank)

    def _wait(self) -> bool:
        """Take what is done first; tells whether anything was before the time was over."""
        left = max(self.deadline - time.monotonic(), 0.0)
        done, _ = wait(self.running, left, FIRST_COMPLETED)
        for future in done:
            self._take(self.running.pop(future), future.result())
        return bool(done)

    def _start_more(self) -> bool:
        """Let all threads have work that may end in time; tells whether any has."""
        least = min((found.took for found in self.found.values() if found.took), default=0.0)
        while len(self.running) < _workers() and (left := self.deadline - time.monotonic()) > least:
            if (candidate := self._choose()) is None:
                break
            logger.info("tune: compiling %s; %d compiled, %d s left", candidate, len(self.found), left)
            try:
                job = self.prepare(candidate)
            except Exception as error:
                if candidate == self.default and not isinstance(error, ValueError | NotImplementedError | TypeError):
                    raise  # of the model itself
                self._take(candidate, _refused(error))
                continue
            future = Future[Measured]()
            self.running[future] = candidate
            # A compilation cannot be ended. No daemon: one that ended while Python itself ends would abort the process.
            threading.Thread(target=self._compile, args=(candidate, job, future), name="tune").start()
        return bool(self.running)

    def _compile(self, candidate: Candidate, job: Callable[[], Measured], future: Future[Measured]) -> None:
        """Compile in a thread, and note what is found even if nobody waits for it any more."""
        start = time.monotonic()
        try:
            found = dataclasses.replace(job(), took=time.monotonic() - start)
            self.cache.write(candidate, found)
        except Exception as error:  # of XLA, about this candidate alone
            found = _refused(error)
        future.set_result(found)

    def _take(self, candidate: Candidate, found: Measured) -> None:
        logger.info("tune: %s: %s", candidate, found.refused or f"{found.seconds * 1e3:.3g} ms")
        self.found[candidate] = found

    def _choose(self) -> Candidate | None:
        """The default; then the most promising, in a loop before its layers stand one by one."""
        waiting = [c for c in self.estimates if c not in {*self.found, *self.running.values()}]
        best = min((found.seconds for c, found in self.found.items() if self.fits(c)), default=math.inf)
        promising = [candidate for candidate in waiting if self.seconds(candidate) <= HOPELESS * best]
        if self.default in waiting:
            return self.default
        first = min(promising, key=lambda c: (not self.fits(c), self.seconds(c)), default=None)
        return first and next(
            (c for c in waiting if c.in_loops and (c.family, c.remat) == (first.family, first.remat)), first
        )


def _refused(error: Exception) -> Measured:
    return Measured(refused=f"refused: {' '.join(str(error).split())[:200]}")


def _workers() -> int:
    """How many compilations run at once: XLA uses several cores for one, and gigabytes."""
    return max(1, min((os.cpu_count() or 1) // 2, 4))
