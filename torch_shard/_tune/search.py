"""Compiling the most promising candidates within a time, several at once; what is known so far is never lost."""

import concurrent.futures
import dataclasses
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable

from torch_shard._tune.arithmetic import Estimate
from torch_shard._tune.cache import Cache, Measured
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.chips import GIB

logger = logging.getLogger(__name__)

HOPELESS = 1.5
"""A candidate whose estimate, corrected by those of its kind, is this many times the best so far is not compiled."""

PROMISING = 1.05
"""Another way to run layers is tried where it is likely to be no longer than this many times the best so far."""

WHOLE = 2
"""So many of the best are compiled whole in the end, if a few layers of them are known."""

NEEDED = 5 * GIB
"""Of the host's memory, for one compilation."""

Prepare = Callable[[Candidate], Callable[[], Measured]]
"""Reads the model in this thread, and gives what compiles in another one."""


@dataclasses.dataclass
class Search:
    """A search under way.

    Args:
        prepare: Makes the compilation of a candidate; where its layers are proved alike, of a few of them.
        estimates: The candidates.
        cache: Asked first.
        deadline: By `time.monotonic`.
        whole: Makes the compilation of all of a candidate.
    """

    prepare: Prepare
    estimates: dict[Candidate, Estimate]
    cache: Cache
    deadline: float
    whole: Prepare | None = None

    def __post_init__(self) -> None:
        self.found: dict[Candidate, Measured] = {}
        self.passed: dict[Candidate, str] = {}
        self.interrupted = False
        self._failures: list[Exception] = []
        self._running: dict[concurrent.futures.Future[Measured], Candidate] = {}

    def run(self) -> None:
        """Compile until the time is over, nothing promising is left, or the user interrupts.

        Raises:
            KeyboardInterrupt: Before anything was found.
            Exception: That of the first candidate, where none can be captured.
        """
        self._read_cache()
        pool = concurrent.futures.ThreadPoolExecutor(_workers(), thread_name_prefix="tune")
        try:
            while self._start_more(pool) and self._wait():
                pass
            for _ in range(WHOLE):
                if not self._running and self._start_whole(pool):
                    self._wait()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if self._failures and not self.found:
            raise self._failures[0]
        for candidate in self._running.values():
            if candidate not in self.found:
                self.passed[candidate] = "still compiling when the time was over"

    def _wait(self) -> bool:
        """Take what is done first; tells whether anything was before the time was over."""
        left = max(self.deadline - time.monotonic(), 0.0)
        done, _ = concurrent.futures.wait(self._running, left, concurrent.futures.FIRST_COMPLETED)
        for future in done:
            self._take(self._running.pop(future), future.result())
        return bool(done)

    def _start_whole(self, pool: concurrent.futures.ThreadPoolExecutor) -> bool:
        """Compile all of the best, of which a few layers are known, if there is time."""
        best = self.best
        if best is None or self.whole is None or not (found := self.found[best]).scaled:
            return False
        sizes = [int(number) for number in re.findall(r"\d+", found.scaled)]
        if time.monotonic() + found.took * sizes[-1] / sum(sizes[:-1]) >= self.deadline:
            return False
        try:
            job = self.whole(best)
        except (ValueError, NotImplementedError, TypeError) as error:
            self.found[best] = dataclasses.replace(found, refused=" ".join(str(error).split())[:200])
            return False
        self._running[pool.submit(self._compile, best, job)] = best
        return True

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        fitting = {c: (found.seconds, found.memory, str(c)) for c, found in self.found.items() if found.fits}
        return min(fitting, key=fitting.__getitem__) if fitting else None

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def _read_cache(self) -> None:
        for candidate in self.estimates:
            if (known := self.cache.read(candidate)) is not None:
                self._take(candidate, known)

    def _start_more(self, pool: concurrent.futures.ThreadPoolExecutor) -> bool:
        """Let all threads have work; tells whether any has."""
        while len(self._running) < _workers() and not self._is_too_late():
            if (candidate := self._choose()) is None:
                break
            try:
                job = self.prepare(candidate)
            except (ValueError, NotImplementedError, TypeError) as error:
                self._failures.append(error)
                self.passed[candidate] = f"refused: {' '.join(str(error).split())[:200]}"
                if len(self._failures) >= 3 and not self.found and not self._running:
                    raise self._failures[0] from None
                continue
            self._running[pool.submit(self._compile, candidate, job)] = candidate
        return bool(self._running)

    def _compile(self, candidate: Candidate, job: Callable[[], Measured]) -> Measured:
        """Compile in a thread, and keep what is found even if nobody waits for it any more."""
        start = time.monotonic()
        found = dataclasses.replace(job(), took=time.monotonic() - start)
        self.cache.write(candidate, found)  # of all of it instead of a few layers
        return found

    def _is_too_late(self) -> bool:
        """Whether a compilation that starts now would end after the time."""
        took = [found.took for found in self.found.values()]
        return time.monotonic() + (min(took) if took and self.best else 0.0) >= self.deadline

    def _take(self, candidate: Candidate, found: Measured) -> None:
        logger.info("tune: %s: %s", candidate, found.refused or f"{found.seconds * 1e3:.3g} ms")
        self.found[candidate] = found

    def _choose(self) -> Candidate | None:
        """By turns a mesh and a recipe of which nothing is known, and another way to run layers where something is."""
        waiting, likely = self._waiting(), self._likely()
        waiting = [candidate for candidate in waiting if not self._is_large(candidate)] or waiting
        known = {candidate.family for candidate in [*self.found, *self._running.values()]}
        ways = [candidate for candidate in waiting if candidate.family in known]
        new = [candidate for candidate in waiting if candidate.family not in known]
        first, second = (min(found, key=likely.__getitem__, default=None) for found in (ways, new))
        best = None if self.best is None else self.found[self.best].seconds
        turn = first is not None and best is not None and len(self.found) % 2 and likely[first] <= best * PROMISING
        order = [
            found for found in ((first, second) if turn or second is None else (second, first)) if found is not None
        ]
        for candidate in order:
            if best is None or likely[candidate] <= HOPELESS * best:
                return candidate
        if best is None:
            return None
        for candidate in waiting:
            seconds = likely[candidate]
            self.passed[candidate] = f"about {seconds * 1e3:.3g} ms by arithmetic, {seconds / best:.2f} x the best"
        return None

    def _likely(self) -> dict[Candidate, float]:
        """Estimates, corrected by what was found of meshes with recipes, and of ways to run layers."""
        ratios = {c: f.seconds / max(self.estimates[c].seconds, 1e-12) for c, f in self.found.items() if f.fits}
        families, ways = dict[object, float](), dict[object, float]()
        for _ in range(3):
            families = _means((c.family, ratio / ways.get(_way(c), 1.0)) for c, ratio in ratios.items())
            ways = _means((_way(c), ratio / families[c.family]) for c, ratio in ratios.items())
        usual = statistics.median(families.values()) if families else 1.0
        return {
            c: made.seconds * families.get(c.family, usual) * ways.get(_way(c), 1.0)
            for c, made in self.estimates.items()
        }

    def _is_large(self, candidate: Candidate) -> bool:
        """Whether a candidate is likely not to fit, by what arithmetic and the compiler said of those like it."""
        alike = [(other, found) for other, found in self.found.items() if _keeps(other) == _keeps(candidate)]
        ratios = [found.memory / self.estimates[other].memory.total for other, found in alike if found.memory]
        limits = [found.limit for _, found in alike if found.limit]
        if not ratios or not limits:
            return False
        return self.estimates[candidate].memory.total * statistics.fmean(ratios) > limits[0]

    def _waiting(self) -> list[Candidate]:
        """Those that may yet be compiled; what needs more than one of its family that did not fit may not."""
        taken = {*self.found, *self.passed, *self._running.values()}
        waiting = [candidate for candidate in self.estimates if candidate not in taken]
        for other, found in self.found.items():
            if found.fits:
                continue
            for candidate in [c for c in waiting if c.family == other.family]:
                if self.estimates[candidate].memory.total >= self.estimates[other].memory.total:
                    self.passed[candidate] = f"needs no less than remat={other.remat}, which does not fit"
                    waiting.remove(candidate)
        return waiting


def _way(candidate: Candidate) -> object:
    return candidate.remat, candidate.scan_layers is False, candidate.accumulate_steps


def _keeps(candidate: Candidate) -> object:
    """What says how much more than arithmetic the compiler keeps."""
    return candidate.remat, candidate.scan_layers is False


def _means(pairs: Iterable[tuple[object, float]]) -> dict[object, float]:
    found: dict[object, list[float]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: statistics.fmean(values) for key, values in found.items()}


def _workers() -> int:
    """How many compilations run at once: XLA uses several cores for one, and gigabytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // 2, int(_free_memory() // NEEDED), 8))


def _free_memory() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # a system that does not say
        return float(NEEDED)
