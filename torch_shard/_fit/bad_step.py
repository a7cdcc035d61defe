"""Reactions of a run to a step whose loss or gradient is not usable."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from torch_shard._common.types import PyTree
from torch_shard._state import TrainState

logger = logging.getLogger(__name__)

ON_BAD_STEP = ("raise", "explain", "stop", "skip")


def check_on_bad_step(on_bad_step: object) -> None:
    """Refuse what a run cannot do."""
    if on_bad_step not in ON_BAD_STEP:
        raise ValueError(f"fit: on_bad_step must be one of {', '.join(map(repr, ON_BAD_STEP))}, got {on_bad_step!r}.")


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


class BadStepPolicy:
    """Looks at each step that was taken, or not.

    Args:
        on_bad_step: One of `ON_BAD_STEP`.
        skip_grad_norm: The largest global norm that is accepted; None if steps are not looked at.
    """

    def __init__(self, on_bad_step: str, skip_grad_norm: float | None) -> None:
        self._do, self.skip_grad_norm = on_bad_step, skip_grad_norm

    def stops(
        self, state: TrainState, metrics: dict[str, PyTree], position: int, began: Callable[[TrainState], str]
    ) -> TrainState | None:
        """Wait for a step, and look at it.

        Returns:
            The state with which the run is to stop: it has not seen the batch, which a resumed run meets again. None if
            the run goes on.
        """
        if self.skip_grad_norm is None or not bool(metrics["guard"].skipped):
            return None
        names = metrics["guard"].non_finite()
        message = f"fit: batch {position} was not taken, the state is as before it: {self._reason(metrics, names)}."
        unseen = dataclasses.replace(state, num_batches=state.num_batches - 1)
        if self._do != "skip" and (names or not math.isfinite(float(metrics["loss"]))):
            message += f" {began(unseen)}."
        if self._do in ("raise", "explain"):
            raise BadStepError(f'{message} on_bad_step="skip" goes on without it.', unseen, names)
        logger.warning("%s The run %s.", message, "stops" if self._do == "stop" else "goes on")
        return unseen if self._do == "stop" else None

    def _reason(self, metrics: dict[str, PyTree], names: list[str]) -> str:
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        if lost := metrics["guard"].nonfinite_buffers() if not names else []:
            return f"the loss is {loss}, and the batch would have made {_some(lost)} not finite"
        if not names:
            return f"the loss is {loss}, the gradient's norm {norm:.4g} (skip_grad_norm={self.skip_grad_norm})"
        total = len(metrics["guard"].finite)
        return f"the loss is {loss}, and {len(names)} of {total} gradients are not finite ({_some(names)})"


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:2])}, ..., {', '.join(names[-2:])}"
