"""Kernels of convolutions that a step keeps with their channels last; the oracles are eager torch and torch's form."""

from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import check_goes_on, run_steps, step_of
from torch_shard._sharding.forms import KernelLast

WIDTH, LAYERS = 8, 3
STORED = {"first.*.conv.weight": KernelLast(4), "up.weight": KernelLast(4), "line.weight": KernelLast(3)}
STORED |= {"square.weight": KernelLast(4)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0), groups=2), nn.GroupNorm(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.conv(x)).tanh()


class Net(nn.Module):
    """Convolutions of a repeated layer in groups, a transposed one, one whose dims are all alike, one along a line."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.up, self.square = nn.ConvTranspose2d(WIDTH, 4, 2, stride=2), nn.Conv2d(4, 4, 4)
        self.line = nn.Conv1d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.square(self.up(self.first(x)).tanh()).tanh().flatten(2))


def make_batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, WIDTH, 4, 4, generator=torch.Generator().manual_seed(seed))


def make_step(model: nn.Module, optimizer: Any, *, stored: Any = STORED, **options: Any) -> ts.TrainStep:
    rules = {"first.*.conv.weight": P("model"), "up.weight": P("model", "batch"), "line.weight": P("model")}
    return step_of(model, loss_fn, optimizer, plan=ts.ShardingPlan(rules, default=P(), stored=stored), **options)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "optax.adamw": lambda p: optax.adamw(1e-2, mask=lambda t: jax.tree.map(lambda a: a.ndim > 1, t)),
    "optax.adafactor": lambda p: optax.adafactor(1e-2, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_train_as_in_torch(name: str):
    model = make_model()
    step = make_step(model, OPTIMIZERS[name](model.parameters()), accumulate_steps=2)
    state, _ = run_steps(step, make_batch, num=2)
    shapes = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(state.params)}
    assert shapes[LAYERS, 3, 1, WIDTH // 2, WIDTH] == P(None, None, None, None, "model")
    assert shapes[2, 2, 4, WIDTH] == P(None, None, "batch", "model")
    assert state.params["up.weight"].sharding.is_equivalent_to(step.plan["up.weight"], 4)
    step.prove(state, make_batch()).raise_if_different()


def test_checkpoints_are_of_torchs_form(tmp_path):
    stored, plain = (make_step(make_model(), optax.adamw(1e-2), stored=stored) for stored in (STORED, {}))
    for number, steps in enumerate([(stored, plain), (plain, stored)]):
        check_goes_on(tmp_path / str(number), run_steps(steps[0], make_batch, num=1)[0], steps, make_batch)
