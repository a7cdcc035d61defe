"""Steps that are taken one after the other, and the states of two such runs compared."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import torch
from torch import nn

import torch_shard as ts
from tests.tables.cases import WHOLE, make_mesh


def run_steps(
    step: ts.TrainStep, make_batch: Callable[[int], torch.Tensor], state: ts.TrainState | None = None, num: int = 3
) -> tuple[ts.TrainState, list[float]]:
    """The state after so many batches, and their losses."""
    state, losses = state or step.init(seed=0), []
    for seed in range(num):
        state, metrics = step(state, make_batch(seed))
        losses.append(float(metrics["loss"]))
    return state, losses


def anew(step: ts.TrainStep, model: nn.Module) -> ts.TrainStep:
    """The step with the values of another model, for its next `init`: a run leaves the step's own model trained."""
    step.model.load_state_dict(model.state_dict())
    return step


def check_same(found: ts.TrainState, wanted: ts.TrainState) -> None:
    """Parameters are equal, but for what another order of sums makes of them in a few steps of Adam."""
    for name in wanted.params:
        np.testing.assert_allclose(found.params[name], wanted.params[name], rtol=2e-4, atol=1e-5, err_msg=name)


def check_goes_on(
    path: pathlib.Path, state: ts.TrainState, steps: tuple[ts.TrainStep, ts.TrainStep], make_batch: Callable[[int], Any]
) -> None:
    """From a state of one step that is saved, another one goes on as the first does."""
    first, second = steps
    with ts.Checkpointer(path) as checkpoints:
        checkpoints.save(state)
    with ts.Checkpointer(path) as checkpoints:
        restored = checkpoints.restore(second)
    check_same(restored, state)
    after, found = run_steps(second, make_batch, restored)
    wanted, expected = run_steps(first, make_batch, state)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    check_same(after, wanted)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss for models of one tensor."""
    return model(x).square().mean()


def step_of(
    model: nn.Module,
    loss_fn: Any = mean_square,
    optimizer: Any = None,
    *,
    mesh: Any = (4, 2),
    plan: ts.ShardingPlan = WHOLE,
    **options: Any,
) -> ts.TrainStep:
    """A step of SGD on a mesh, or its sizes; every device holds all, if no plan says otherwise.

    It does not look at the loss again, which costs a capture: tests of that, of what torch allows in a forward, and of
    random programs and lives do.
    """
    options = {"look_again": False, **options}
    mesh = make_mesh(mesh) if isinstance(mesh, tuple) else mesh
    return ts.make_train_step(model, loss_fn, optimizer or optax.sgd(0.1), mesh=mesh, plan=plan, **options)


def sgd_step(
    model: nn.Module, loss_fn: Any, sizes: tuple[int, int] = (1, 1), *, rate: float = 0.1, **options: Any
) -> ts.TrainStep:
    """A step of plain SGD at this rate on a mesh of these sizes."""
    return step_of(model, loss_fn, optax.sgd(rate), mesh=sizes, **options)
