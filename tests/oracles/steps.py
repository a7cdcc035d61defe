"""Steps that are taken one after the other, and the states of two such runs compared."""

from collections.abc import Callable

import numpy as np
import torch

import torch_shard as ts


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
