"""The best choices run on real devices, for a few steps each: what was predicted beside what is."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax

from torch_shard._common.types import PyTree
from torch_shard._train import TrainStep
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.tuning import Choice, Tuning

BEST, STEPS = 3, 10


def measured_choices(
    tuning: Tuning, make: Callable[[Choice], TrainStep], batch: PyTree, *, default: Candidate
) -> Tuning:
    """Run the best choices and the default, and order them by the clock."""
    best = [c for c in tuning.choices if c in tuning.choices[:BEST] or c.candidate == default]
    fitting = [choice for choice in best if tuning.limit is None or choice.memory <= tuning.limit]
    ran = [dataclasses.replace(choice, measured=_seconds(make(choice), batch)) for choice in fitting]
    ran.sort(key=lambda choice: choice.measured or 0.0)
    return dataclasses.replace(tuning, choices=(*ran, *(c for c in tuning.choices if c not in fitting)))


def _seconds(step: TrainStep, batch: PyTree) -> float:
    """The median of some steps after the first."""
    state, placed, times = step.init(seed=0), step.put(batch), list[float]()
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        state, metrics = step(state, placed)
        jax.block_until_ready((state.params, metrics))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
