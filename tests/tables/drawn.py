"""Arrays and models to draw, and where JAX puts their parts."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts


def cells(drawing):
    """The cells of the grid, row by row: lines of devices and lines of ranges take turns."""
    lines = [line for line in drawing.splitlines() if line.startswith("│")]
    parts = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return [list(zip(*pair, strict=True)) for pair in zip(parts[::2], parts[1::2], strict=True)]


def sharded(shape, *spec, **axis_sizes):
    sharding = NamedSharding(ts.make_mesh(**(axis_sizes or {"batch": 4, "model": 2})), P(*spec))
    return jax.device_put(np.zeros(shape, np.float32), sharding)


# Pictures
LAYOUTS = [P("a", "b"), P("b", "a"), P("a", None), P(None, "b"), P(("a", "b"), None), P()]

MESHES = [(8, 1), (4, 2), (2, 4)]


def layout(mesh, spec, shape=(64, 32)):
    sharding = NamedSharding(ts.make_mesh(a=mesh[0], b=mesh[1]), spec)
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def jax_parts(struct):
    """By device, its part in numbers, as JAX says it."""
    shape = struct.shape
    placed = struct.sharding.devices_indices_map(shape)
    return {
        device.id: tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        for device, index in placed.items()
    }


# Modules, dicts, states
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return self.head(self.norm(x))


PLAN = ts.ShardingPlan(
    {
        "tokens.weight": P("model", None),
        "blocks.*.up.weight": P("model"),
        "blocks.*.up.bias": P("model"),
        "blocks.*.down.weight": P(None, "model"),
    },
    default=P(),
)
