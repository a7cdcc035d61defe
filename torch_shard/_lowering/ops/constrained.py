"""One operator, the identity, that lays a tensor and its gradient out on the devices in a given way."""

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.fx import Node

from torch_shard._common.fx import args_of, operator_name, shape_of
from torch_shard._common.overrides import captured_op
from torch_shard._common.specs import axes_of, has_three_axes
from torch_shard._common.types import Operator
from torch_shard._lowering.constraints import RESULT, ROWS, SEQUENCE, Constraint, Placed, dim_of, lies, whole_along
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import RowSplit

_FREE = True
"""Written for `PartitionSpec.UNCONSTRAINED`, which no text stands for."""


for _name, _schema in {
    "constrained": '(Tensor x, str spec, str gathered="") -> Tensor',
    "whole_along": "(Tensor x, SymInt[] dims) -> Tensor",
    "laid": "(Tensor x, str sequence) -> Tensor",
}.items():
    captured_op(f"torch_shard::{_name}", _schema)(lambda x, *_: torch.empty_like(x))

CONSTRAINED = torch.ops.torch_shard.constrained.default
WHOLE_ALONG = torch.ops.torch_shard.whole_along.default
LAID = torch.ops.torch_shard.laid.default


@lowers(CONSTRAINED, WHOLE_ALONG, LAID)
def same(x: jax.Array, *_: object) -> jax.Array:
    """The same array: how it lies is a constraint of the node."""
    return x


class Laid(torch.autograd.Function):
    """A tensor laid out by such an operator, with these arguments; its gradient with others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operator: Operator, own: tuple, of_gradient: tuple) -> torch.Tensor:
        ctx.given = operator, of_gradient, own
        return operator(x, *own)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return Laid.apply(grads[0], *ctx.given), None, None, None


def constrained(x: torch.Tensor, spec: PartitionSpec, gathered: Sequence[str] = ()) -> torch.Tensor:
    """A tensor of a capture, which a step splits like this over its mesh; its values stay what they are.

    Args:
        x: Any shape.
        spec: At most one part for each dim, which it divides; `PartitionSpec.UNCONSTRAINED` leaves one to the compiler.
        gathered: Axes over which its gradient, which is split in the same way, is gathered then.
    """
    own, of_gradient = (_write(spec), ""), (_write(spec), json.dumps(gathered) if gathered else "")
    return Laid.apply(x, CONSTRAINED, own, of_gradient)  # pyright: ignore


def _write(spec: PartitionSpec) -> str:
    return json.dumps([_FREE if part is PartitionSpec.UNCONSTRAINED else part for part in spec])


def _read(text: str) -> PartitionSpec:
    parts = [tuple(part) if isinstance(part, list) else part for part in json.loads(text)]
    return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if part is _FREE else part for part in parts))


def spec_apart(text: str, ndim: int, at: int) -> str:
    """The spec of a value as that of its pieces, which have a dim of their own before dim `at`: each is split alike."""
    parts = [*_read(text), *(None for _ in range(ndim - len(_read(text))))]
    return _write(PartitionSpec(*parts[:at], None, *parts[at:]))


@lies(WHOLE_ALONG)
def _whole(node: Node, split: RowSplit) -> Placed:
    why = "pieces of a fused projection are put together"
    if any("experts" in operator_name(user) for reshaped in node.users for user in reshaped.users):
        yield RESULT, Constraint(PartitionSpec(split.experts), why)  # on the device that has the expert
    else:
        yield RESULT, whole_along(node, args_of(node)[1], split, why)


@lies(CONSTRAINED)
def _asked(node: Node, split: RowSplit) -> Placed:
    _, spec, gathered = (*args_of(node), "")[:3]
    parts, shape, row_dim, sequence_dim = _read(spec), shape_of(node), dim_of(node, ROWS), dim_of(node, SEQUENCE)
    if row_dim is not None and has_three_axes(split.mesh):
        parts = _beside_rows(parts, shape, row_dim, split)
    if split.context is not None and sequence_dim is not None:
        parts = _along_sequence(parts, shape, sequence_dim, split)
    parts = _dividing(parts, shape, split.mesh)
    yield RESULT, Constraint(parts, "the plan's activations", in_steps=True)
    if axes := [axis for axis in json.loads(gathered or "[]") if axis not in split.data_axes]:
        yield RESULT, Constraint(_without(axes, parts), "the plan's activations, gathered", in_steps=True)


def _dividing(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec as far as dims divide: a dim may be cut into pieces."""
    free = PartitionSpec.UNCONSTRAINED

    def kept(size: int, part: Any) -> Any:
        axes = () if part is free else axes_of((part,))
        return free if size % math.prod(mesh.shape[axis] for axis in axes) else part

    return PartitionSpec(*(kept(size, part) for size, part in zip(shape, spec, strict=False)))


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
