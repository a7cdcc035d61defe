"""Values that have the rows of the batch stay split as the batch is, where the compiler would choose otherwise.

Where parameters are split over the axes of the batch too (FSDP), XLA's partitioner may split the hidden dims of
activations over these axes and sum the results over the devices, with the whole batch on each. A constraint on the
rows, which leaves all other dims to the partitioner, keeps it from that; it changes no number.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.fx import Node

from torch_shard._common.fx import operator_name
from torch_shard._common.operator_families import PRODUCTS
from torch_shard._common.pieces import InPieces
from torch_shard._common.types import PyTree

ROWS = "rows"
"""Under this name the metadata of a node say which dim of its value has the rows of the batch."""

_KEPT = PRODUCTS | {"embedding", "add"}


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """How the rows of a batch lie on a mesh.

    Attributes:
        mesh: All devices of the step.
        axes: Those over which the rows are split.
        kept: Whether values are to keep their rows split so, where the compiler might choose otherwise.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    kept: bool = True

    @property
    def num_shards(self) -> int:
        """Number of parts."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    def sharding(self, dim: int, ndim: int) -> NamedSharding:
        """That of a value which has the rows along one of its dims: the compiler chooses for the others."""
        free = PartitionSpec.UNCONSTRAINED
        return NamedSharding(self.mesh, PartitionSpec(*(self.axes if at == dim else free for at in range(ndim))))


_CURRENT: contextvars.ContextVar[RowSplit | None] = contextvars.ContextVar("rows", default=None)


def current_rows() -> RowSplit | None:
    """How the rows lie in the program that is being traced; None where that is not known."""
    return _CURRENT.get()


@contextlib.contextmanager
def rows_split(split: RowSplit | None) -> Iterator[None]:
    """Let programs that are traced within know how the rows of the batch lie."""
    token = _CURRENT.set(split)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def keep_rows(node: Node, value: PyTree) -> PyTree:
    """The value of a node, with its rows split over the devices where that is asked for."""
    split, dim = _CURRENT.get(), node.meta.get(ROWS)
    if split is None or not split.kept or dim is None or operator_name(node) not in _KEPT:
        return value
    if value.shape[dim] % split.num_shards:
        return value
    if isinstance(value, InPieces):
        at = dim + (dim > value.ndim + value.dim)
        return InPieces(jax.lax.with_sharding_constraint(value.array, split.sharding(at, value.ndim + 1)), value.dim)
    return jax.lax.with_sharding_constraint(value, split.sharding(dim, value.ndim))
