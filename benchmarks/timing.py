"""Ratios of paired runs: two functions in turn, in one process, so that a busy machine slows both alike."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Times of two sides run in turn.

    Attributes:
        ours_s: Median seconds of the first side.
        rival_s: Median seconds of the second.
        median: Median of the paired ratios, first over second.
        low: Their lower quartile.
        high: Their upper quartile.
        pairs: How many.
    """

    ours_s: float
    rival_s: float
    median: float
    low: float
    high: float
    pairs: int


def seconds(fn: Callable[[], object], calls: int = 1) -> float:
    """Wall time of one call of `fn`, averaged over `calls`."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def summary(times: np.ndarray) -> Ratio:
    """The `Ratio` of paired times, shape `(pairs, 2)`, in seconds."""
    low, median, high = np.quantile(times[:, 0] / times[:, 1], [0.25, 0.5, 0.75])
    ours_s, rival_s = np.median(times, axis=0)
    return Ratio(float(ours_s), float(rival_s), float(median), float(low), float(high), len(times))


def round_robin(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Times of several sides run in turn, `rounds` each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for fn in sides.values():
        fn()
    for i in range(rounds):
        order = list(sides.items())
        for name, fn in order if i % 2 else order[::-1]:
            times[name].append(seconds(fn))
    return {name: np.array(found) for name, found in times.items()}
