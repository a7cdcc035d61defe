"""A tensor that is to lie on the devices in a given way, and its gradient likewise: as one operator, the identity."""

import json
import math
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_shard._common.pieces import InPieces
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import RowSplit, current_rows
from torch_shard._sharding import axes_of, constrain_in_steps

_FREE = True
"""Written for `PartitionSpec.UNCONSTRAINED`, which no text stands for."""


@torch.library.custom_op("torch_shard::constrained", mutates_args=())
def _constrained(x: torch.Tensor, spec: str) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_constrained.register_fake
def _alike(x: torch.Tensor, spec: str) -> torch.Tensor:
    return torch.empty_like(x)


class _Constrained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: str) -> torch.Tensor:
        ctx.spec = spec
        return torch.ops.torch_shard.constrained(x, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Constrained.apply(grads[0], ctx.spec), None


def constrained(x: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """A tensor of a capture, which a step splits like this over its mesh; its values stay what they are.

    Args:
        x: Any shape.
        spec: At most one part for each dim, which it divides; `PartitionSpec.UNCONSTRAINED` leaves one to the compiler.
    """
    return _Constrained.apply(x, _write(spec))  # pyright: ignore


def _write(spec: PartitionSpec) -> str:
    return json.dumps([_FREE if part is PartitionSpec.UNCONSTRAINED else part for part in spec])


def _read(text: str) -> PartitionSpec:
    parts = [tuple(part) if isinstance(part, list) else part for part in json.loads(text)]
    return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if part is _FREE else part for part in parts))


CONSTRAINED = torch.ops.torch_shard.constrained.default


@lowers(CONSTRAINED, pieces=True)
def constrained_array(x: jax.Array | InPieces, spec: str) -> jax.Array | InPieces:
    """The same array, laid out on the mesh of the step; as it is where there is none."""
    rows, parts = current_rows(), _read(spec)
    if rows is None:
        return x
    if not isinstance(x, InPieces):
        return constrain_in_steps(_by_rows(x, rows, parts), NamedSharding(rows.mesh, parts), rows.axes)
    if (apart := _of_pieces(x, parts, rows.mesh)) is None:
        return constrained_array(x.whole(), spec)
    return InPieces(jax.lax.with_sharding_constraint(x.array, NamedSharding(rows.mesh, apart)), x.dim)


def _by_rows(x: jax.Array, rows: RowSplit, spec: PartitionSpec) -> jax.Array:
    """What is to leave the axes of the batch, at first split by rows alone, on a mesh of three axes.

    XLA's partitioner fails there with gathers whose result moves at once (jaxlib 0.10.2; tests/fuzz/test_fuzz.py).
    """
    stays = not spec or spec[0] is PartitionSpec.UNCONSTRAINED or tuple(axes_of(spec[:1])) == rows.axes
    if len(rows.mesh.shape) < 3 or stays or x.shape[0] % rows.num_shards:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(rows.mesh, PartitionSpec(rows.axes)))


def _of_pieces(x: InPieces, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec | None:
    """The spec with each piece split alike; None where they do not divide."""
    parts = [*spec, *(None for _ in range(x.ndim - len(spec)))]
    part = parts[x.dim]
    if part is not PartitionSpec.UNCONSTRAINED and x.size % math.prod(mesh.shape[axis] for axis in axes_of((part,))):
        return None
    parts.insert(x.ndim + x.dim, None)
    return PartitionSpec(*parts)
