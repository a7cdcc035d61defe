"""Steps that are taken one after the other, and the states of two such runs compared."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import torch

import torch_shard as ts
from tests.tables.cases import WHOLE, make_mesh


def sgd_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    sizes: tuple[int, int] = (1, 1),
    *,
    rate: float = 0.1,
    plan: ts.ShardingPlan = WHOLE,
    **options: Any,
) -> ts.TrainStep:
    """A step of plain SGD on a mesh of these sizes; every device holds all, unless a plan says otherwise."""
    return ts.make_train_step(model, loss_fn, optax.sgd(rate), mesh=make_mesh(sizes), plan=plan, **options)


def run_steps(
    step: ts.TrainStep, make_batch: Callable[[int], torch.Tensor], state: ts.TrainState | None = None, num: int = 3
) -> tuple[ts.TrainState, list[float]]:
    """The state after so many batches, and their losses."""
    state, losses = state or step.init(seed=0), []
    for seed in range(num):
        state, metrics = step(state, make_batch(seed))
        losses.append(float(metrics["loss"]))
    return state, losses


def check_same(found: ts.TrainState, wanted: ts.TrainState) -> None:
    """Parameters are equal, but for what another order of sums makes of them in a few steps of Adam."""
    for name in wanted.params:
        np.testing.assert_allclose(found.params[name], wanted.params[name], rtol=2e-4, atol=1e-5, err_msg=name)
