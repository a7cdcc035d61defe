"""A model with all that a checkpoint must keep, its step, and what a state holds by name."""

import jax
import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.down(self.drop(self.up(x).tanh()))


class Model(nn.Module):
    """Repeated layers, dropout, a tie, a frozen layer, buffers of both kinds."""

    def __init__(self, num_layers=4, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(WIDTH, width, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.tied.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.tied(self.norm(x)).relu()) * self.scale


PLAN = ts.ShardingPlan(
    {"blocks.*.up.weight": P("model"), "blocks.*.down.weight": P(None, "model"), "tied.weight": P("model")}, default=P()
)


def squares(model, batch):
    return model(batch).square().mean()


def make_step(*, model=None, mesh=(4, 2), plan=PLAN, optimizer=None, **options):
    torch.manual_seed(0)
    mesh = ts.make_mesh(batch=mesh[0], model=mesh[1])
    return ts.make_train_step(
        model or Model(), squares, optimizer or optax.adamw(1e-2), mesh=mesh, plan=plan, **options
    )


def batch(number):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def train(step, state, numbers):
    losses = []
    for number in numbers:
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def by_name(state):
    """Every value of a state on the host, by the model's names, however it is stored."""
    values = {name: np.asarray(array) for name, array in state.tensors.items()}
    moments = state.opt_state[0]
    values |= {f"{kind} {name}": np.asarray(m) for kind in ("mu", "nu") for name, m in getattr(moments, kind).items()}
    values |= {"count": np.asarray(moments.count), "step": np.asarray(state.step)}
    return values | {"key": np.asarray(jax.random.key_data(state.key)), "batches": np.asarray(state.num_batches)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)
