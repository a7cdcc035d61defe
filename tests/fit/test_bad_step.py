"""Steps that are not taken: named, skipped, or the end of the run."""

import math

import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.runs import DATA, FEATURES, loader, values


def poisoned(position, at):
    batch = DATA[:8].clone()
    batch[0, 0] = math.nan if position == at else 0
    return batch


def test_bad_step_is_named(step, tmp_path):
    batches = [poisoned(n, 3) for n in range(6)]
    with ts.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ts.BadStepError, match=r"batch 4 was not taken.*the loss is nan.*that of 3\.bias") as found:
            ts.fit(step, None, batches, steps=6, checkpointer=checkpointer, progress=False)
        assert found.value.non_finite == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
        assert (int(found.value.state.step), int(found.value.state.num_batches)) == (3, 3)
        assert "the state is saved in" in "".join(found.value.__notes__)
        assert checkpointer.steps() == [3]
        with pytest.raises(ts.BadStepError, match="batch 4 was not taken"):  # and not passed over in silence
            ts.fit(step, None, batches, steps=6, checkpointer=checkpointer, progress=False)
        state = checkpointer.restore(step)
    good = ts.fit(step, step.init(seed=0), batches[:3], steps=3, progress=False)
    for name, value in values(good).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


def test_bad_step_is_skipped_or_ends_the_run(step, caplog):
    batches = [poisoned(n, 3) for n in range(6)]
    state = ts.fit(step, step.init(seed=0), batches, steps=6, on_bad_step="skip", progress=False)
    assert (int(state.step), int(state.num_batches)) == (5, 6)
    assert all(np.isfinite(value).all() for value in values(state).values())
    assert "batch 4 was not taken" in caplog.text
    state = ts.fit(step, step.init(seed=0), batches, steps=6, on_bad_step="stop", progress=False)
    assert (int(state.step), int(state.num_batches)) == (3, 3)


def test_large_gradient_is_no_step(step):
    with pytest.raises(ts.BadStepError, match=r"the gradient's norm .* \(max_grad_norm=1e-09\)") as found:
        ts.fit(step, step.init(seed=0), loader(), steps=2, max_grad_norm=1e-9, progress=False)
    assert found.value.non_finite == []


def test_first_bad_gradient_is_where_backward_came_to_it():
    """A square root of zero has no gradient: what stands before it is bad, what stands after it is not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(FEATURES, FEATURES) for _ in range(3))

        def forward(self, x):
            return self.c(torch.sqrt(self.b(self.a(x)) * 0))

    mesh = ts.make_mesh(batch=8)
    options = {"mesh": mesh, "plan": ts.ShardingPlan({}, default=P())}
    step = ts.make_train_step(Model(), lambda m, x: m(x).sum(), optax.sgd(0.1), **options)
    with pytest.raises(ts.BadStepError, match=r"4 of 6 gradients are not finite .* that of b\.bias") as found:
        ts.fit(step, None, [DATA[:8]], steps=1, progress=False)
    assert found.value.non_finite == ["a.weight", "a.bias", "b.weight", "b.bias"]
