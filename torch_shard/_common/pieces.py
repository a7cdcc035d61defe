"""Values in pieces: the product of a fused projection, of which one dim is kept apart as pieces of one size.

Merged, the dim would have to be split over devices by rows that no piece lines up with. Operators that know values in
pieces keep the dim apart (`_lowering/pieces.py`); to all others a value is given merged, which is right, and slower.
"""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from torch_shard._common.types import PyTree

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InPieces:
    """A value whose dim `dim` is kept as two: pieces, and what is in each.

    Attributes:
        array: `(..., num, n, ...)`, where the value is `(..., num * n, ...)`.
        dim: Of the value, and of what is in a piece; from the end, so negative: rows of a stack count alike.
    """

    array: jax.Array
    dim: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, value: "jax.Array | InPieces", num: int, dim: int) -> "InPieces":
        """A value with its dim `dim`, from the end, in so many pieces."""
        if isinstance(value, InPieces):
            if (value.num, value.dim) == (num, dim):
                return value
            value = value.whole()
        return cls(value.reshape(cut(value.shape, num, dim)), dim)

    @property
    def num(self) -> int:
        """Number of pieces."""
        return self.array.shape[self.dim - 1]

    @property
    def size(self) -> int:
        """Of the dim in one piece."""
        return self.array.shape[self.dim]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the value, merged."""
        at = self.array.ndim + self.dim
        return (*self.array.shape[: at - 1], self.num * self.size, *self.array.shape[at + 1 :])

    @property
    def ndim(self) -> int:
        """Number of dims of the value."""
        return self.array.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        """Of its elements."""
        return self.array.dtype

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """That of the array, for one of the value: each piece is split alike."""
        parts = [*spec, *(None for _ in range(self.ndim - len(spec)))]
        parts.insert(self.ndim + self.dim, None)
        return PartitionSpec(*parts)

    def whole(self) -> jax.Array:
        """The value itself."""
        return self.array.reshape(self.shape)

    def astype(self, dtype: np.dtype) -> "InPieces":
        """The same in another dtype."""
        return InPieces(self.array.astype(dtype), self.dim)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> "InPieces":
        """One or several rows, of a stack."""
        assert self.ndim + self.dim > 0, "the first dim is in pieces itself"
        return InPieces(self.array[rows], self.dim)


def cut(shape: tuple[int, ...], num: int, dim: int) -> tuple[int, ...]:
    """A shape with its dim `dim`, from the end, in so many pieces."""
    at = len(shape) + dim
    return (*shape[:at], num, shape[at] // num, *shape[at + 1 :])


def whole(value: PyTree) -> PyTree:
    """A value, merged if it is in pieces; also several."""

    def merged(leaf: PyTree) -> PyTree:
        return leaf.whole() if isinstance(leaf, InPieces) else leaf

    return jax.tree.map(merged, value, is_leaf=lambda leaf: isinstance(leaf, InPieces))
