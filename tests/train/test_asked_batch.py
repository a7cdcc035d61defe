"""Python that asks for a value, or a size, that depends on the batch: computed on the host before each call."""

from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch

MESH = {"batch": 4, "model": 2}

Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(*labels: int) -> Batch:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(sum(labels))), torch.tensor(labels)


A, B, C = batch_of(0, 1, 2, 0, 1, 2, 2, 1), batch_of(3, 1, 2, 0, 1, 3, 2, 1), batch_of(0, 0, 1, 0, 1, 1, 0, 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def number_of_groups(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, place = batch
    size = int(place.max()) + 1
    return (torch.zeros(size, 4).index_add(0, place, model(x)) / size).square().sum()


def pairs(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    y = model(x)
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    first, second = torch.where(same)
    if len(first) == 0:
        return y.sum() * 0
    return (y[first] - y[second]).square().sum(1).mean()


def sorted_selection(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    chosen = model(x)[labels > 0]
    return (chosen.sort(0)[0] * torch.arange(1, len(chosen) + 1)[:, None]).mean()


def branch(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    if (labels == 3).sum() == 0:
        return model(x).square().mean()
    return model(x).abs().mean()


def listed(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    return torch.stack([model(x)[row, label] for row, label in enumerate(labels.tolist())]).square().sum()


def classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    found, inverse = labels.unique(return_inverse=True)
    centres = torch.zeros(len(found), 4).index_add(0, inverse, model(x))
    return centres.square().mean() + F.one_hot(labels).sum() * 0.1


def one_after_another(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each question depends on what came out of the one before."""
    x, labels = batch
    where = torch.nonzero(labels)[:, 0]
    half = where[: len(where) // 2]
    kept = half[labels[half] > 1]
    return model(x)[kept].sum() * (1 if kept.numel() > 1 else 2) + model(x).square().mean()


def written(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What is asked for is written in place, before and after."""
    x, labels = batch
    counts = torch.zeros(4)
    counts.index_add_(0, labels, torch.ones(8))
    most = int(counts[:2].max())
    counts.zero_()
    return model(x)[:, :most].square().mean() + counts.sum()


def like_what_is_computed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mask that is made like a result of the model, whose values do not matter to it."""
    x, labels = batch
    y = model(x)
    mask = torch.zeros_like(y)
    mask[torch.arange(8), labels] = 1
    if mask.bool().any() and (mask[:, 3] > 0).any():
        return y.square().mean()
    return (y * mask).sum()


LOSSES: list[Callable[[nn.Module, Batch], torch.Tensor]] = [
    number_of_groups,
    pairs,
    sorted_selection,
    branch,
    listed,
    classes,
    one_after_another,
    written,
    like_what_is_computed,
]


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss: loss.__name__)
def test_equals_eager_torch(loss_fn: Any) -> None:
    agrees_with_torch(net(), loss_fn, [A, B, C, A])


def step_of(loss_fn: Any, model: nn.Module | None = None, **options: Any) -> ts.TrainStep:
    mesh, plan = ts.make_mesh(**MESH), ts.ShardingPlan({}, default=P())
    return ts.make_train_step(model or net(), loss_fn, optax.sgd(0.1), mesh=mesh, plan=plan, **options)


def test_each_value_has_one_program() -> None:
    step = step_of(number_of_groups)
    state = step.init(seed=0)
    for batch in (A, B, C, A, B, C, A):
        state, _ = step(state, batch)
    assert step.num_compiles == 3


def test_indices_of_one_length_are_inputs_of_one_program() -> None:
    step = step_of(pairs)
    state, _ = step(step.init(seed=0), A)
    x, labels = A
    model = step.export(state)
    state, metrics = step(state, (x, labels.flip(0)))
    assert step.num_compiles == 1
    assert float(metrics["loss"]) == pytest.approx(pairs(model, (x, labels.flip(0))).item(), rel=1e-5)


def missing(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    if torch.isnan(y).any():
        y = torch.nan_to_num(y)
    return (model(x) - y).square().mean()


def test_a_branch_on_whether_the_batch_is_finite() -> None:
    whole, gaps = torch.randn(8, 4), torch.full((8, 4), torch.nan)
    agrees_with_torch(net(), missing, [(A[0], whole), (A[0], gaps), (A[0], whole)])
