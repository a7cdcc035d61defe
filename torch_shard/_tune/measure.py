"""The best choices run on real devices, for a few steps each: what was predicted beside what is."""

# JAX annotates its functions in part; optax has no stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import dataclasses
import statistics
import time

import jax
import optax
import torch
from torch import nn

from torch_shard._common.types import PyTree
from torch_shard._sharding import LossFn
from torch_shard._train import make_train_step
from torch_shard._tune.tuning import Choice, Tuning

BEST, STEPS = 3, 10


def measured_choices(
    tuning: Tuning,
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | torch.optim.Optimizer,
    *,
    batch: PyTree,
) -> Tuning:
    """Run the best choices, and order them by the clock.

    Args:
        tuning: With devices that can run.
        model: With values.
        loss_fn: Its loss.
        optimizer: Its optimizer.
        batch: With values.

    Raises:
        ValueError: The model or the batch has no values.
    """
    first, others = tuning.choices[:BEST], tuning.choices[BEST:]
    ran = [dataclasses.replace(c, measured=_seconds(c, model, loss_fn, optimizer, batch=batch)) for c in first]
    ran.sort(key=lambda choice: choice.measured or 0.0)
    return dataclasses.replace(tuning, choices=(*ran, *others))


def _seconds(
    choice: Choice,
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | torch.optim.Optimizer,
    *,
    batch: PyTree,
) -> float:
    """The median of some steps after the first."""
    step = make_train_step(model, loss_fn, optimizer, **choice.options)
    state, placed, times = step.init(seed=0), step.put(batch), list[float]()
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        state, metrics = step(state, placed)
        jax.block_until_ready((state.params, metrics))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
