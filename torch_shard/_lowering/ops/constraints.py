"""One operator, the identity, that lays a tensor and its gradient out on the devices in a given way."""

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_shard._common.overrides import captured_op
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import RowSplit, current_rows, whole_dims
from torch_shard._sharding import axes_of, constrain_in_steps, has_three_axes

_FREE = True
"""Written for `PartitionSpec.UNCONSTRAINED`, which no text stands for."""


@captured_op("torch_shard::constrained")
def _alike(x: torch.Tensor, spec: str, gathered: str = "") -> torch.Tensor:
    return torch.empty_like(x)


class _Constrained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: str, gathered: str, is_gradient: bool) -> torch.Tensor:
        ctx.given = spec, gathered, not is_gradient
        return torch.ops.torch_shard.constrained(x, spec, gathered if is_gradient else "")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Constrained.apply(grads[0], *ctx.given), None, None, None


def constrained(x: torch.Tensor, spec: PartitionSpec, gathered: Sequence[str] = ()) -> torch.Tensor:
    """A tensor of a capture, which a step splits like this over its mesh; its values stay what they are.

    Args:
        x: Any shape.
        spec: At most one part for each dim, which it divides; `PartitionSpec.UNCONSTRAINED` leaves one to the compiler.
        gathered: Axes over which its gradient, which is split in the same way, is gathered then.
    """
    return _Constrained.apply(x, _write(spec), json.dumps(gathered) if gathered else "", False)  # pyright: ignore


def _write(spec: PartitionSpec) -> str:
    return json.dumps([_FREE if part is PartitionSpec.UNCONSTRAINED else part for part in spec])


def _read(text: str) -> PartitionSpec:
    parts = [tuple(part) if isinstance(part, list) else part for part in json.loads(text)]
    return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if part is _FREE else part for part in parts))


def spec_apart(text: str, ndim: int, at: int) -> str:
    """The spec of a value as that of its pieces, which have a dim of their own before dim `at`: each is split alike."""
    parts = [*_read(text), *(None for _ in range(ndim - len(_read(text))))]
    return _write(PartitionSpec(*parts[:at], None, *parts[at:]))


@captured_op("torch_shard::whole_along")
def _held_whole(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return torch.empty_like(x)


@lowers(torch.ops.torch_shard.whole_along.default)
def whole_along(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """The same array, of which each device has all along these dims."""
    return whole_dims(x, *dims)


CONSTRAINED = torch.ops.torch_shard.constrained.default


@lowers(CONSTRAINED)
def constrained_array(
    x: jax.Array,
    spec: str,
    gathered: str = "",
    row_dim: int | None = None,
    sequence_dim: int | None = None,
) -> jax.Array:
    """The same array, laid out on the mesh of the step; as it is where there is none."""
    rows, parts = current_rows(), _read(spec)
    if rows is None:
        return x
    if row_dim is not None and has_three_axes(rows.mesh):
        parts = _beside_rows(parts, x.shape, row_dim, rows)
    if rows.context is not None and sequence_dim is not None:
        parts = _along_sequence(parts, x.shape, sequence_dim, rows)
    x = _laid_out(x, parts, rows)
    axes = [axis for axis in json.loads(gathered or "[]") if axis not in rows.data_axes]
    return _laid_out(x, _without(axes, parts), rows) if axes else x


def _laid_out(x: jax.Array, spec: PartitionSpec, rows: RowSplit) -> jax.Array:
    pairs = zip(x.shape, spec, strict=False)
    parts = (part if _divides(size, part, rows.mesh) else PartitionSpec.UNCONSTRAINED for size, part in pairs)
    return constrain_in_steps(x, NamedSharding(rows.mesh, PartitionSpec(*parts)), rows.data_axes)


def _without(axes: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    """The spec without these axes."""

    def without(part: Any) -> Any:
        if part is PartitionSpec.UNCONSTRAINED:
            return part
        return tuple(axis for axis in axes_of((part,)) if axis not in axes) or None

    return PartitionSpec(*map(without, spec))


def _beside_rows(spec: PartitionSpec, shape: tuple[int, ...], row_dim: int, rows: RowSplit) -> PartitionSpec:
    """The spec with the rows of the batch where they are, which they would come back to anyway.

    On meshes of three axes, XLA's partitioner errs where they leave (jaxlib 0.10.2; tests/system/test_partitioner.py).
    """
    parts = [*_without(rows.axes, spec), *(None for _ in range(row_dim + 1 - len(spec)))]
    parts[row_dim] = PartitionSpec.UNCONSTRAINED if shape[row_dim] % rows.num_shards else rows.axes
    return PartitionSpec(*parts)


def _along_sequence(spec: PartitionSpec, shape: tuple[int, ...], dim: int, rows: RowSplit) -> PartitionSpec:
    """The spec with the sequence split over the axis of the context too, which it does not speak of."""
    assert rows.context is not None
    parts = [*spec, *(None for _ in range(dim + 1 - len(spec)))]
    if parts[dim] is PartitionSpec.UNCONSTRAINED or rows.context.axis in axes_of(spec):
        return spec
    axes = (rows.context.axis, *axes_of((parts[dim],)))
    parts[dim] = axes if shape[dim] % rows.size_of(axes) == 0 else parts[dim]
    return PartitionSpec(*parts)


def _divides(size: int, part: Any, mesh: Mesh) -> bool:
    return part is PartitionSpec.UNCONSTRAINED or size % math.prod(mesh.shape[axis] for axis in axes_of((part,))) == 0
