"""Metric objects in a loss: kept out of the program, and updated after each step with what eager torch gives them."""

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH


class Metric(nn.Module):
    """As torchmetrics has them: an update that looks at values, states in plain attributes, one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.total, self.seen, self.count = torch.zeros(()), [], 0

    def update(self, values: torch.Tensor, target: torch.Tensor, *, weight: float = 1.0) -> None:
        assert target.dtype is torch.int64
        self.total = self.total + weight * values.sum()
        self.seen.append(target)
        self.count += 1

    def compute(self) -> torch.Tensor:
        return torch.stack([self.total / max(self.count, 1), torch.cat(self.seen).float().mean()])

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a captured function calls update alone")


class Picky(Metric):
    def update(self, values: torch.Tensor, target: torch.Tensor, *, weight: float = 1.0) -> None:
        super().update(values * values.max().item(), target, weight=weight)


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torchmetrics")
    module.Metric = Metric  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torchmetrics", module)


class Model(nn.Module):
    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(8, 4), metric


def batches(num: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(BATCH, 8, generator=generator), torch.randint(0, 4, (BATCH,), generator=generator))
        for _ in range(num)
    ]


def loss_of(*, within: bool, metric: Any, use: Callable[..., Any]) -> Any:
    def loss_fn(model: Model, batch: Any) -> Any:
        out = model.layer(batch[0])
        use(model.metric if within else metric, out, batch[1])
        return F.cross_entropy(out, batch[1])

    return loss_fn


def make(model: nn.Module, loss_fn: Any, accumulate_steps: int = 1) -> ts.TrainStep:
    return sgd_step(model, loss_fn, (4, 2), accumulate_steps=accumulate_steps)


def check(make_metric: Callable[[], Any], use: Callable[..., Any], *, within: bool, accumulate_steps: int = 1) -> None:
    """Train, evaluate and compare what the objects have gathered with eager torch."""
    torch.manual_seed(0)
    model, ours = Model(make_metric() if within else nn.Identity()), make_metric()
    wanted_model, wanted = copy.deepcopy(model), copy.deepcopy(ours)
    step = make(model, loss_of(within=within, metric=ours, use=use), accumulate_steps)
    eager = loss_of(within=within, metric=wanted, use=use)
    sgd = torch.optim.SGD(wanted_model.parameters(), lr=0.1)
    state, found = step.init(), [model.metric if within else ours]
    evaluate = step.evaluation()
    for batch in batches(3):
        state, metrics = step(state, batch)
        assert set(metrics) == {"loss", "grad_norm"}
        sgd.zero_grad()
        for part in range(accumulate_steps):
            rows = torch.arange(BATCH).view(4, accumulate_steps, -1)[:, part].reshape(-1)
            loss = eager(wanted_model, tuple(t[rows] for t in batch))
            (loss / accumulate_steps).backward()
        sgd.step()
    evaluate(state, batches(1)[0])
    with torch.no_grad():
        eager(wanted_model.eval(), batches(1)[0])
    assert step.num_compiles == 1
    theirs = wanted_model.metric if within else wanted
    torch.testing.assert_close(found[0].compute(), theirs.compute(), rtol=1e-4, atol=1e-5)


def update(metric: Any, out: torch.Tensor, target: torch.Tensor) -> None:
    metric.update(out, target, weight=0.5)


@pytest.mark.parametrize(("within", "accumulate_steps"), [(True, 1), (False, 2)])
def test_objects_gather_what_they_do_in_eager_torch(within: bool, accumulate_steps: int) -> None:
    check(Picky, update, within=within, accumulate_steps=accumulate_steps)


def test_a_proof_leaves_objects_alone() -> None:
    metric = Metric()
    step = make(Model(nn.Identity()), loss_of(within=False, metric=metric, use=update))
    batch, state = batches(1)[0], step.init()
    step.prove(state, batch)
    assert metric.count == 0
    step(state, batch)
    assert metric.count == 1


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda m, out, target: m.compute(), "uses what a Picky has gathered.*after the step"),
        (lambda m, out, target: m.reset(), "uses what a Picky has gathered"),
        (lambda m, out, target: m(out, target), r"uses what a Picky has gathered.*Only update\(\.\.\.\) in loss_fn"),
    ],
)
def test_what_a_program_cannot_know_is_refused(use: Any, match: str) -> None:
    metric = Picky()
    step = make(Model(nn.Identity()), loss_of(within=False, metric=metric, use=use))
    with refuses(rf"(?s)test_metric_updates.*{match}", NotImplementedError):
        step(step.init(), batches(1)[0])
    assert (metric.count, metric.seen) == (0, [])
