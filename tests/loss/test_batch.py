"""The batch: what it may hold, and how it must divide."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step
from tests.tables.cases import CASE, WHOLE, make_mesh, make_step


def test_a_batch_that_does_not_divide() -> None:
    case = CASE["mlp"]
    step = make_step(case)
    x, y = case.batches(1)[0]
    with refuses(
        r"(?s)mesh \(batch=4, model=2\).*batch\[0\] \(6, 12\): dim 0 = 6 is not a multiple of batch=4.*drop_last"
    ):
        step(step.init(), (x[:6], y))


def test_integers_of_a_batch_must_fit() -> None:
    step = sgd_step(nn.Embedding(8, 2), lambda model, x: model(x).mean(), (4, 2))
    with refuses("values from 0 to 1099511627776, which do not fit int32", OverflowError):
        step(step.init(), torch.tensor([0, 2**40] * 4))


def test_64_bit_floats_of_a_batch_are_rounded_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """As eager torch does with the same loss, which has to convert them."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, weight = (torch.as_tensor(t) for t in batch)
        assert x.dtype is y.dtype is torch.float64
        return (weight * (model(x.float()) - y) ** 2).mean()

    rng = np.random.default_rng(0)
    batch = (rng.normal(size=(8, 8)), torch.from_numpy(rng.normal(size=(8, 2))), torch.ones(8, 1))
    model = nn.Linear(8, 2)
    step = sgd_step(model, loss_fn, (4, 2))
    state = step.init()
    for _ in range(2):
        state, _ = step(state, batch)
    assert [r.getMessage()[:95] for r in caplog.records if r.levelname == "WARNING"] == [
        "make_train_step: batch[0], batch[1]: 64-bit floating point, of which JAX keeps 32 bits: values "
    ]
    found = ts.compare_with_torch(model, loss_fn, batch, mesh=make_mesh((4, 2)), plan=WHOLE, steps=2)
    found.raise_if_different()
    with refuses(r"A float64 array of shape \(8, 8\) has values from .*, which do not fit float32", OverflowError):
        step(state, (batch[0] * 1e300, *batch[1:]))


def test_dicts_of_a_batch_keep_their_order() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert list(batch) == ["y", "x"]
        assert list(batch["y"]) == ["b", "a"]
        return F.mse_loss(model(batch["x"]), torch.stack(list(batch["y"].values()), 1))

    model = nn.Linear(8, 2)
    batch = {"y": {"b": torch.ones(8), "a": torch.zeros(8)}, "x": torch.randn(8, 8)}
    wanted = loss_fn(model, batch).item()
    step = sgd_step(model, loss_fn, (8, 1))
    _, metrics = step(step.init(), batch)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)
