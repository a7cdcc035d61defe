"""Values of a graph with a dim in pieces, and the nodes that are made of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from torch_shard._common.fx import dtype_of, new_before, shape_of

Cut = tuple[int, int]
"""Number of pieces, and the dim from the end."""

aten, ours = torch.ops.aten, torch.ops.torch_shard


@dataclasses.dataclass(frozen=True)
class Apart:
    """A value with a dim in pieces.

    Attributes:
        node: `(..., num, n, ...)`, where the value is `(..., num * n, ...)`.
        shape: That of the value.
        num: Number of pieces.
        dim: Of the value, and of what is in a piece; from the end, so negative.
    """

    node: Node
    shape: tuple[int, ...]
    num: int
    dim: int

    @property
    def cut(self) -> Cut:
        return self.num, self.dim

    @property
    def at(self) -> int:
        """The dim, from the first; in the node, that of the pieces."""
        return len(self.shape) + self.dim

    @property
    def size(self) -> int:
        """Of the dim in one piece."""
        return self.shape[self.dim] // self.num

    def both(self, dim: int) -> tuple[int, ...]:
        """The dims of the node that stand for one of the value."""
        return (dim, dim + 1) if dim == self.at else (dim + (dim > self.at),)


Value = Node | Apart


def cut_shape(shape: tuple[int, ...], num: int, dim: int) -> tuple[int, ...]:
    """A shape with its dim `dim`, from the end, in so many pieces."""
    at = len(shape) + dim
    return (*shape[:at], num, shape[at] // num, *shape[at + 1 :])


def shape_of_value(value: Value) -> tuple[int, ...]:
    """That of the value itself."""
    return value.shape if isinstance(value, Apart) else shape_of(value)


def node_of(value: Value) -> Node:
    """The node that has it."""
    return value.node if isinstance(value, Apart) else value


def empty(shape: tuple[int, ...], like: Node) -> torch.Tensor:
    """A fake of that shape."""
    return torch.empty(shape, dtype=dtype_of(like), device="meta")


class Builder:
    """Makes nodes.

    Args:
        wanted: The nodes of the graph as it was whose values are to be in pieces.
    """

    def __init__(self, wanted: Mapping[Node, Cut]) -> None:
        self.wanted = wanted
        self._merged: dict[Node, Node] = {}

    def call(self, at: Node, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], like: Node) -> Node:
        """A new node before `at`, of that shape, with the dtype of `like`."""
        node = new_before(at, target, args, empty(shape, like))
        node.meta = {name: value for name, value in node.meta.items() if not name.startswith("random_")}
        return node

    def apart(self, old: Node, target: Any, args: tuple[Any, ...], cut: Cut) -> Apart:
        """What an operator gives in pieces, in place of an old node."""
        shape = shape_of(old)
        return Apart(self.call(old, target, args, cut_shape(shape, *cut), old), shape, *cut)

    def reshaped(self, at: Node, node: Node, shape: tuple[int, ...]) -> Node:
        return self.call(at, aten.reshape.default, (node, list(shape)), shape, node)

    def whole(self, at: Node, value: Value) -> Node:
        """A value, put together if it is in pieces, of which each device has all then.

        XLA's partitioner errs where split dims become one, or one becomes two (tests/system/test_partitioner.py).
        """
        if isinstance(value, Node):
            return value
        if value.node not in self._merged:
            self._merged[value.node] = self.reshaped(
                at, self._held(at, value.node, value.at, value.at + 1), value.shape
            )
        return self._merged[value.node]

    def as_pieces(self, at: Node, value: Value, num: int, dim: int) -> Node:
        """A value in pieces, of which each device has all if they were not apart."""
        if isinstance(value, Apart) and value.cut == (num, dim):
            return value.node
        node, shape = self.whole(at, value), shape_of_value(value)
        node = self._held(at, node, len(shape) + dim) if num > 1 else node
        return self.reshaped(at, node, cut_shape(shape, num, dim))

    def _held(self, at: Node, node: Node, *dims: int) -> Node:
        return self.call(at, ours.whole_along.default, (node, list(dims)), shape_of(node), node)
