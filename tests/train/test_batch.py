"""The batch: what it may hold, and how it must divide."""

import dataclasses
from typing import Any

import numpy as np
import optax
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.tables.cases import CASE, make_mesh, make_step


def test_a_batch_that_does_not_divide() -> None:
    case = CASE["mlp"]
    step = make_step(case)
    x, y = case.batches(1)[0]
    with refuses(
        r"(?s)mesh \(batch=4, model=2\).*batch\[0\] \(6, 12\): dim 0 = 6 is not a multiple of batch=4.*drop_last"
    ):
        step(step.init(), (x[:6], y))


def test_a_batch_of_an_unknown_kind() -> None:
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor

    step = make_step(CASE["mlp"])
    with refuses(r"leaf of type Pair.*register_dataclass\(Pair\)", TypeError):
        step(step.init(), Pair(torch.ones(8, 8), torch.ones(8, 4)))


def test_integers_of_a_batch_must_fit() -> None:
    case = CASE["gpt"]
    step = make_step(case)
    x, y = case.batches(1)[0]
    with refuses("values from 0 to 1099511627776, which do not fit int32", OverflowError):
        step(step.init(), (x.clone().index_fill_(0, torch.tensor([0]), 2**40).clamp(min=0), y))


def test_dicts_of_a_batch_keep_their_order() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert list(batch) == ["y", "x"]
        assert list(batch["y"]) == ["b", "a"]
        return F.mse_loss(model(batch["x"]), torch.stack(list(batch["y"].values()), 1))

    model, plan = nn.Linear(8, 2), ts.ShardingPlan({}, default=P())
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=plan)
    batch = {"y": {"b": torch.ones(8), "a": torch.zeros(8)}, "x": torch.randn(8, 8)}
    _, metrics = step(step.init(), batch)
    np.testing.assert_allclose(metrics["loss"], loss_fn(model, batch).item(), rtol=1e-6)
