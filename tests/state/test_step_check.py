"""A step that is not taken leaves the state as it was."""

import math

import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.checkpointed import WIDTH, assert_same, batch, by_name, make_step, squares


def test_guarded_step_keeps_the_state():
    step = make_step()
    state, _ = step(step.init(seed=0), batch(0), skip_grad_norm=math.inf)
    before = by_name(state)
    state, metrics = step(state, batch(1) * math.nan, skip_grad_norm=math.inf)
    assert bool(metrics["guard"].skipped)
    assert metrics["guard"].non_finite()[0] == "blocks.0.up.weight"
    after = by_name(state)
    assert after.pop("batches") == before.pop("batches") + 1
    assert_same(after, before)


def test_guarded_step_keeps_the_state_where_squares_overflow():
    """A gradient of 1e24 is finite; its square, which Adam keeps, is not, and would stop the parameter for good."""
    step = make_step(model=nn.Linear(WIDTH, WIDTH), plan=ts.ShardingPlan({}, default=P()), optimizer=optax.adam(1e-2))
    state, metrics = step(step.init(seed=0), batch(0) * 1e12, skip_grad_norm=math.inf)
    assert metrics["guard"].non_finite() == []
    assert bool(metrics["guard"].skipped)
    assert all(np.isfinite(value).all() for value in by_name(state).values())


def test_guarded_step_keeps_buffers_finite():
    """Batch norm divides an absurd batch away, so that the loss is fine; the running variance would not be."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model.register_buffer("mask", torch.full((2,), -math.inf))  # is not finite, and may be so
    step = make_step(model=model, plan=ts.ShardingPlan({}, default=P()))
    state, metrics = step(step.init(seed=0), batch(0), skip_grad_norm=math.inf)
    assert not bool(metrics["guard"].skipped)
    state, metrics = step(state, batch(1) * 1e25, skip_grad_norm=math.inf)
    assert math.isfinite(metrics["loss"])
    assert metrics["guard"].nonfinite_buffers() == ["0.running_var"]
    assert bool(metrics["guard"].skipped)
    assert np.isfinite(state.buffers["0.running_var"]).all()


def test_norm_of_half_precision_loses_no_terms():
    """Added up in bfloat16, the squares of gradients would stop at 256 times the size of those that follow."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            row = torch.randn(WIDTH)
            self.parts = nn.ParameterList(nn.Parameter(row * scale) for scale in (16.0, *[1.0] * 60))

        def forward(self, x):
            return x @ torch.stack(list(self.parts)).T

    model = Many().bfloat16()
    step = make_step(model=model, mesh=(1, 1), plan=ts.ShardingPlan({}, default=P()), optimizer=optax.sgd(0.0))
    squares(model, batch(0).bfloat16()).backward()
    wanted = torch.stack([part.grad.float().square().sum() for part in model.parts]).sum().sqrt()
    _, metrics = step(step.init(seed=0), batch(0).bfloat16())
    # each gradient is rounded to 8 bits; without the 60 small ones the norm would be a tenth less
    np.testing.assert_allclose(float(metrics["grad_norm"]), float(wanted), rtol=2**-8)
