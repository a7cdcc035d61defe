"""Numbers that Python asks of a buffer or of the batch, given to one program with each call."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

ROWS, WIDTH = 8, 4


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, ROWS, 6, generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


class Asking(nn.Module):
    def __init__(self, size: int = 40, **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, WIDTH)
        self.register_buffer("queue", torch.randn(WIDTH, size, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("at", torch.zeros(1).long())
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @property
    def size(self) -> int:
        return self.queue.shape[1]


class MoCo(Asking):
    """Momentum contrast, as published: keys of a slower encoder are written to a queue at a position."""

    def __init__(self, size: int = 40) -> None:
        super().__init__(size)
        self.slow = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = nn.functional.normalize(self.layer(x), dim=1)
        with torch.no_grad():
            for param, slow in zip(self.layer.parameters(), self.slow.parameters(), strict=True):
                slow.data = slow.data * 0.9 + param.data * (1.0 - 0.9)
            k = nn.functional.normalize(self.slow(x), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.2
        if self.training:
            self.enqueue(k)
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        at = int(self.at)
        assert self.size % len(keys) == 0
        self.queue[:, at : at + len(keys)] = keys.T
        self.at[0] = (at + len(keys)) % self.size


class Ring(Asking):
    """A queue whose size is no multiple of the batch, so that it wraps in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.layer(x)
        loss = (keys @ self.queue.clone()).square().mean()
        at, new = int(self.at), keys.detach().T
        if at + len(x) > self.size:
            rest = self.size - at
            self.queue[:, at:] = new[:, :rest]
            self.queue[:, : len(x) - rest] = new[:, rest:]
        else:
            self.queue[:, at : at + len(x)] = new
        self.at.fill_((at + len(x)) % self.size)
        return loss


class Indexed(Asking):
    """The same by indices, by a mask, by a roll, a single column, and a range in place of a slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, at = self.layer(x), self.at.item()
        fresh = torch.arange(self.size) < at
        loss = (keys @ self.queue.clone() * fresh).square().mean() + keys[:, at % WIDTH].mean()
        loss = loss + (keys.mean() * torch.full((2,), at)).sum() + (keys.sum(0) * torch.tensor([at] * WIDTH)).mean()
        places = torch.arange(at, at + len(x)) % self.size
        self.queue[:, places] = keys.detach().T
        self.queue[0, at] = 3.0
        self.queue.copy_(self.queue.roll(at, 1))
        self.at[0] = (at + len(x)) % self.size
        return loss


class Scaled(Asking):
    """A weight and a momentum that depend on the number of the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at += 1
        n = int(self.at)
        y = self.layer(x)
        self.queue.mul_(1 - 1 / (n + 1)).add_(y.detach().mean(), alpha=1 / (n + 1))
        return y.square().mean() * n + (y.mean() / n - n) * 0.5**n + self.queue.mean()


def trained(model: nn.Module, count: int, loss_fn: Callable[..., Any] = loss_of) -> nn.Module:
    """What eager torch makes of a model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for batch in batches(count):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return model


def step_of(model: nn.Module, loss_fn: Any = loss_of, mesh: Any = None, plan: Any = None, **options: Any) -> Any:
    mesh = mesh or ts.make_mesh(batch=2, model=2, devices=jax.devices()[:4])
    plan = ts.ShardingPlan(plan or {}, default=P())
    return ts.make_train_step(model, loss_fn, optax.sgd(0.1, momentum=0.9), mesh=mesh, plan=plan, **options)


def assert_alike(found: nn.Module, wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        # sums over rows are split over devices: float32 rounds otherwise
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize(
    ("model", "count", "most"),
    [(MoCo(), 12, 2), (Ring(44), 14, 4), (Indexed(), 12, 2), (Scaled(), 12, 2)],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_equals_eager_torch_with_few_programs(model: nn.Module, count: int, most: int) -> None:
    step = step_of(model)
    state = step.init(seed=0)
    for batch in batches(count):
        state, _ = step(state, batch)
    assert_alike(step.export(state), trained(model, count))
    assert step.num_compiles <= most


def test_a_queue_that_is_split() -> None:
    for spec in (P("model", None), P(None, "model"), P(None, ("batch", "model"))):
        model = MoCo()
        step = step_of(model, plan={"queue": spec})
        state = step.init(seed=0)
        for batch in batches(7):
            state, _ = step(state, batch)
        assert_alike(step.export(state), trained(model, 7))
        assert step.num_compiles == 2
