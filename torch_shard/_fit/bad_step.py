"""Reactions of a run to a step whose loss or gradient is not usable."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import jax

from torch_shard._common.types import PyTree
from torch_shard._inspect import find_nan, replay, save_bad_batch
from torch_shard._state import TrainState
from torch_shard._train import ShardedBatch, TrainStep

logger = logging.getLogger(__name__)

ON_BAD_STEP = ("raise", "explain", "stop", "skip")


class BadStepError(ArithmeticError):
    """A step was not taken: its loss or gradient is not finite, or its gradient is larger than allowed.

    `fit` raises it where `on_bad_step="raise"`.

    Args:
        message: Which batch, which loss, and which parameters.
        state: The state as it was before the step.
        non_finite: Names of the parameters with a gradient that is not finite, in the module's order.

    Attributes:
        state: The state as it was before the step; the run can go on from it.
        non_finite: Names of the parameters with a gradient that is not finite, in the module's order.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> try:
        ...     ts.fit(step, None, [torch.full((8, 4), torch.inf)], steps=1, progress=False)
        ... except ts.BadStepError as error:
        ...     int(error.state.step), error.non_finite
        (0, ['weight', 'bias'])
    """

    def __init__(self, message: str, state: TrainState, non_finite: list[str]) -> None:
        super().__init__(message)
        self.state, self.non_finite = state, non_finite


def why_bad(metrics: dict[str, PyTree], skip_grad_norm: float) -> tuple[list[str], str]:
    """Parameters with a gradient that is not finite, and why a step was not taken, in words."""
    loss, norm, names = float(metrics["loss"]), float(metrics["grad_norm"]), metrics["guard"].non_finite()
    if names:
        total = len(metrics["guard"].finite)
        return names, f"the loss is {loss}, and {len(names)} of {total} gradients are not finite ({_some(names)})"
    if lost := metrics["guard"].nonfinite_buffers():
        return names, f"the loss is {loss}, and the batch would have made {_some(lost)} not finite"
    return names, f"the loss is {loss}, the gradient's norm {norm:.4g} (skip_grad_norm={skip_grad_norm})"


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:2])}, ..., {', '.join(names[-2:])}"


_MOST_WORK = 1e12
"""Parameters times numbers of a batch: more would take eager torch on a CPU minutes."""

_UNKNOWN = "Where it began is not known"


def first_non_finite(step: TrainStep, placed: ShardedBatch, state: TrainState) -> str:
    """Say where the first value that is not finite came from, or that it is not known; one sentence."""
    work = sum(p.numel() for p in step.model.parameters()) * sum(math.prod(array.shape) for array in placed.arrays)
    if jax.process_count() > 1 or work > _MOST_WORK:
        return f"{_UNKNOWN}: repeating the batch in eager torch would take long"
    try:
        found = replay(step, state, placed)
    except Exception as error:
        logger.info("fit: the batch of a bad step cannot be repeated in eager torch.", exc_info=True)
        return f"{_UNKNOWN}: eager torch ends this batch with {type(error).__name__}: {error}".rstrip(".")
    if not found:
        return f"{_UNKNOWN}: in eager torch on the CPU all values of this batch are finite"
    return ". ".join([found.sentence, *(note.rstrip(".") for note in found.notes)])


def explained(step: TrainStep, placed: ShardedBatch, state: TrainState, directory: Path | None) -> str:
    """Say all that `find_nan` does, and keep the batch."""
    kept = ""
    if directory is not None:
        path = save_bad_batch(step, placed, directory)
        kept = f"\n\nThe batch is in {path}: torch-shard replay FILE.py {directory} says this again"
    return f"\n\n{find_nan(step, state, placed)}{kept}"
