"""Bytes that one step sends, by recipe, against the textbook's, counted in the program that TPU's compiler makes.

Eight chips of a v5e that is not here; nothing is executed. The textbook is that of rings: an all-reduce of `n` bytes
over `k` devices sends `2 n (k - 1) / k` from each, a gather or a scatter half of it. Data parallelism reduces each
gradient, fully sharded it gathers each parameter twice and scatters its gradient, ZeRO-1 scatters gradients and gathers
parameters, tensor parallelism sums the residual stream twice in each layer, forward and backward, and once after
the embedding and before the head (the tables of MaxText's guide on sharding and of the scaling book). With the stream
split along its sequence each sum is a scatter and a gather, and what two column layers of each block took is gathered
once more in the backward pass, as it is kept split (Korthikanti et al., 2022). With the sequence of the batch on an
axis of its own, keys and values of all tokens are gathered, again in the backward pass, and their gradients scattered.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from benchmarks import models
from benchmarks.rows import Row, sized
from benchmarks.tpu_counts import received_by

TOPOLOGY = "v5e:2x4"
TARGET = 1.10
PAGE = """
## Bytes sent, by recipe

A GPT on eight chips, float32, under TPU's compiler: what each device receives in one step, over what the textbook has
for the recipe.
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a GPT and its batch.

    Attributes:
        layers: How many.
        width: Of the residual stream.
        vocab: Of the tied embedding.
        length: Of a row.
        rows: Of a batch.
    """

    layers: int = 3
    width: int = 256
    vocab: int = 1024
    length: int = 128
    rows: int = 32

    def model(self, fused: bool = False) -> models.GPT:
        """On the meta device; fused, q, k and v are one layer."""
        with torch.device("meta"):
            return models.GPT(self.layers, self.width, self.width // 64, self.vocab, self.length, fused)

    @property
    def parameters(self) -> int:
        """Bytes."""
        return sum(4 * p.numel() for p in self.model().parameters())

    def stream(self, batch: int) -> int:
        """Bytes of the residual stream of a device's rows."""
        return self.rows // batch * self.length * self.width * 4


def ring(num_bytes: float, num_devices: int) -> float:
    """Bytes that a gather to so many bytes, or a scatter from them, sends from each device."""
    return num_bytes * (num_devices - 1) / num_devices


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is split.

    Attributes:
        axes: Of the mesh.
        options: Of the step, for a model and a mesh.
        textbook: Bytes that it sends.
        fused: Whether the model has q, k and v in one layer.
    """

    axes: dict[str, int]
    options: Callable[[torch.nn.Module, Mesh], dict[str, Any]]
    textbook: Callable[[Sizes], float]
    fused: bool = False


def _tensor_parallel(sizes: Sizes) -> float:
    return (4 * sizes.layers + 2) * 2 * ring(sizes.stream(batch=4), 2)


def _fully_sharded_too(sizes: Sizes) -> float:
    return _tensor_parallel(sizes) + 3 * ring(sizes.parameters / 2, 4)


RECIPES = {
    "replicated": Recipe(
        {"batch": 8}, lambda model, mesh: {"plan": ts.plans.replicated()}, lambda sizes: 2 * ring(sizes.parameters, 8)
    ),
    "ZeRO-1": Recipe(
        {"batch": 8},
        lambda model, mesh: {"plan": ts.plans.replicated(), "optimizer_plan": ts.plans.fsdp(model, mesh)},
        lambda sizes: 2 * ring(sizes.parameters, 8),
    ),
    "fsdp": Recipe(
        {"batch": 8},
        lambda model, mesh: {"plan": ts.plans.fsdp(model, mesh)},
        lambda sizes: 3 * ring(sizes.parameters, 8),
    ),
    "hsdp": Recipe(
        {"replica": 2, "batch": 4},
        lambda model, mesh: {"plan": ts.plans.hsdp(model, mesh), "batch_spec": P(("replica", "batch"))},
        lambda sizes: 3 * ring(sizes.parameters, 4) + 2 * ring(sizes.parameters / 4, 2),
    ),
    "tp": Recipe(
        {"batch": 4, "model": 2},
        lambda model, mesh: {"plan": ts.plans.tp(model, mesh)},
        lambda sizes: _tensor_parallel(sizes) + 2 * ring(sizes.parameters / 2, 4),
    ),
    "fsdp_tp": Recipe(
        {"batch": 4, "model": 2}, lambda model, mesh: {"plan": ts.plans.fsdp_tp(model, mesh)}, _fully_sharded_too
    ),
    "fsdp_tp, sequence": Recipe(
        {"batch": 4, "model": 2},
        lambda model, mesh: {"plan": ts.plans.fsdp_tp(model, mesh, sequence=True)},
        lambda sizes: _fully_sharded_too(sizes) + 2 * sizes.layers * ring(sizes.stream(batch=4), 2),
    ),
}


def _context(sizes: Sizes) -> float:
    """Keys and values are gathered in both passes, and their gradients scattered."""
    return 3 * ring(sizes.parameters, 8) + 3 * sizes.layers * 2 * ring(sizes.stream(batch=2), 4)


RECIPES["context"] = Recipe(
    {"batch": 2, "context": 4},
    lambda model, mesh: {"plan": ts.plans.fsdp_tp(model, mesh, tp=None, context="context")},
    _context,
)
RECIPES |= {
    f"{name}, fused": dataclasses.replace(RECIPES[name], fused=True) for name in ("tp", "fsdp_tp", "fsdp_tp, sequence")
}


def compiled(name: str, sizes: Sizes) -> jax.stages.Compiled:
    """The step of a recipe."""
    recipe = RECIPES[name]
    model = sizes.model(recipe.fused)
    mesh = ts.make_mesh(topology=TOPOLOGY, **recipe.axes)
    step = ts.make_train_step(
        model, models.token_loss, optax.adamw(1e-3), mesh=mesh, scan_layers=True, **recipe.options(model, mesh)
    )
    batch = tuple(torch.empty(sizes.rows, sizes.length, dtype=torch.int64, device="meta") for _ in range(2))
    return step.lower(step.structs, batch).compile()


def measure(name: str, sizes: Sizes) -> float:
    """Bytes that each device receives from others in one step."""
    return received_by(compiled(name, sizes).as_text() or "")


def rows(quick: bool) -> Iterator[Row]:
    """Each recipe over its textbook."""
    sizes = Sizes() if quick else Sizes(layers=6, width=512, vocab=2048, length=256, rows=64)
    for name, recipe in RECIPES.items():
        yield sized(f"{name}, bytes sent ÷ textbook", measure(name, sizes), recipe.textbook(sizes), TARGET)
