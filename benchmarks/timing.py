"""Ratios of paired runs: sides in turn, so that a busy machine slows all of them alike."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

REST_S = 0.02
"""Between two sides: the threads of the one go on spinning for some milliseconds, on cores that the next needs."""


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
    """Times of several sides run in turn, `rounds` each, after one call of each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for fn in sides.values():
        fn()
    for i in range(rounds):
        order = list(sides.items())
        for name, fn in order if i % 2 else order[::-1]:
            time.sleep(REST_S)
            times[name].append(seconds(fn))
    return {name: np.array(found) for name, found in times.items()}


def race(sides: dict[str, Callable[[Any], float]], batch: Any, rounds: int) -> dict[str, np.ndarray]:
    """Times of sides that train on a batch, once they agree."""
    agree(sides, batch)
    return round_robin({name: functools.partial(side, batch) for name, side in sides.items()}, rounds)


def agree(sides: dict[str, Callable[[Any], float]], batch: Any, steps: int = 3, rtol: float = 1e-3) -> None:
    """Run the first steps of all sides, which must have the losses of the first.

    Args:
        sides: Each trains by one step and returns the loss before it.
        batch: Of each step.
        steps: How many.
        rtol: By default that of float32 sums in another order, carried over a few steps of AdamW.

    Raises:
        AssertionError: A side computes something else, so its time would mean nothing.
    """
    losses = {name: [side(batch) for _ in range(steps)] for name, side in sides.items()}
    wanted = next(iter(losses.values()))
    for name, found in losses.items():
        np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=name)
    assert wanted[-1] < wanted[0], f"nothing was learnt: {wanted}"
