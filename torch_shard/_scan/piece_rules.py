"""What operators make of values in pieces: a rule gives what stands for a node; None has pieces put together."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as torch_pytree

from torch_shard._common.fx import (
    REDUCTIONS,
    RESHAPES,
    args_of,
    aten_name,
    dtype_of,
    is_pointwise,
    new_before,
    shape_of,
    target_of,
)
from torch_shard._lowering import CONSTRAINED, spec_apart
from torch_shard._scan.dims import moved

# ---- values of a graph with a dim in pieces, and the nodes that are made of them ----


Cut = tuple[int, int]
"""Number of pieces, and the dim from the end."""

aten = torch.ops.aten
ours = torch.ops.torch_shard


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
    before = shape[:at]
    after = shape[at + 1 :]
    return (*before, num, shape[at] // num, *after)


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

        # A view or a product draws nothing, though the operator in whose place it stands may.
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
            on_each_device = self._whole_along(at, value.node, value.at, value.at + 1)
            self._merged[value.node] = self.reshaped(at, on_each_device, value.shape)
        return self._merged[value.node]

    def as_pieces(self, at: Node, value: Value, num: int, dim: int) -> Node:
        """A value in pieces, of which each device has all if they were not apart."""
        if isinstance(value, Apart) and value.cut == (num, dim):
            return value.node

        shape = shape_of_value(value)
        node = self.whole(at, value)
        if num > 1:
            node = self._whole_along(at, node, len(shape) + dim)
        return self.reshaped(at, node, cut_shape(shape, num, dim))

    def _whole_along(self, at: Node, node: Node, *dims: int) -> Node:
        """A value that is not split along these dims."""
        return self.call(at, ours.whole_along.default, (node, list(dims)), shape_of(node), node)


Rule = Callable[[Builder, Node, Sequence[Any], Mapping[str, Any]], Any]
"""`(builder, node, arguments with values for nodes, keyword arguments) -> value, or a list of them, or None`."""

TURNS = ("t", "transpose", "permute")
PRODUCTS = ("mm", "bmm", "matmul")
_SHAPES = ("unsqueeze", "squeeze")


def rule_of(node: Node) -> Rule | None:
    """The rule of a node's operator."""
    name = aten_name(node)
    if node.target in RESHAPES or name in _SHAPES:
        return _view
    if node.target is CONSTRAINED:
        return _constrained
    return _RULES.get(name) or (_pointwise if is_pointwise(node) else None)


def moved_to(node: Node, source: Node, dim: int) -> int | None:
    """Where a dim of a source is in a result, both from the end."""
    (found,) = moved(node, source, len(shape_of(source)) + dim)
    return None if found is None else found - len(shape_of(node))


def cut_in_view(old: tuple[int, ...], cut: Cut, new: tuple[int, ...]) -> Cut | None:
    """Where the pieces of a value of shape `old` are in its view; None where they have a dim of their own, or none."""
    num, dim = cut
    elements_before = math.prod(old[: len(old) + dim])
    for at, size in enumerate(new):
        begins_alike = math.prod(new[:at]) == elements_before
        has_whole_pieces = size > num and size % num == 0
        if begins_alike and has_whole_pieces and old[dim] % size == 0:
            return num, at - len(new)
    return None


def filled(args: Sequence[Any], *defaults: Any) -> list[Any]:
    """Positional arguments, with the defaults of those that are not given."""
    return [*args, *defaults[len(args) :]]


def _constrained(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, spec, *rest = args
    if not isinstance(x, Apart):
        return None
    spec = spec_apart(spec, len(x.shape), x.at)
    return builder.apart(node, node.target, (x.node, spec, *rest), x.cut)


def _pointwise(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    cuts = {value.cut for value in torch_pytree.tree_leaves((args, named)) if isinstance(value, Apart)}
    if len(cuts) != 1 or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    (cut,) = cuts
    num, dim = cut

    def operand(value: Any) -> Any:
        if isinstance(value, Apart):
            return value.node
        if not isinstance(value, Node):
            return value
        shape = shape_of(value)
        if len(shape) < -dim:
            return value  # it has no such dim, and broadcasts along both
        num_pieces = 1 if shape[dim] == 1 else num
        return builder.reshaped(node, value, cut_shape(shape, num_pieces, dim))

    positional, kwargs = torch_pytree.tree_map(operand, (tuple(args), named))
    result = builder.apart(node, node.target, positional, cut)
    result.node.kwargs = kwargs
    return result


def _view(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value:
    """Elements stay in their order, so that pieces stay apart wherever the new shape has a dim of whole pieces."""
    x = args[0]
    shape = shape_of(node)
    cut = builder.wanted.get(node)
    if cut is None and isinstance(x, Apart):
        cut = cut_in_view(x.shape, x.cut, shape)
    if cut is None:
        return builder.reshaped(node, node_of(x), shape)
    return builder.apart(node, aten.reshape.default, (node_of(x), list(cut_shape(shape, *cut))), cut)


def _permute(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x = args[0]
    if not isinstance(x, Apart):
        return None
    order = _order(node)
    dims: list[int] = []
    for dim in order:
        dims += x.both(dim)
    new_dim = order.index(x.at) - len(order)
    return builder.apart(node, aten.permute.default, (x.node, dims), (x.num, new_dim))


def _order(node: Node) -> list[int]:
    """The order of dims that a node gives: that of sizes which are their numbers."""
    _, *rest = args_of(node)
    numbered = torch.empty(*range(len(shape_of(node))), device="meta")
    return list(target_of(node)(numbered, *rest).shape)


def _matmul(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    left, right = args[:2]
    dims = [factor.dim if isinstance(factor, Apart) else None for factor in (left, right)]
    if min(len(shape_of_value(factor)) for factor in (left, right)) < 2:
        return None

    # Pieces of the rows of the left factor, or of the columns of the right one, are pieces of the product.
    if dims == [-2, None]:
        return builder.apart(node, ours.einsum.default, _product(left, right, "pij,jk->pik"), left.cut)
    if dims == [None, -1]:
        return builder.apart(node, ours.einsum.default, _product(left, right, "ij,jpk->ipk"), right.cut)

    # Pieces of the dim that is summed over: the other factor is cut alike, and both dims are summed over.
    if dims not in ([-1, None], [None, -2], [-1, -2]):
        return None
    num = left.num if isinstance(left, Apart) else right.num
    left = builder.as_pieces(node, left, num, -1)
    right = builder.as_pieces(node, right, num, -2)
    return builder.call(node, ours.einsum.default, _product(left, right, "ipj,pjk->ik"), shape_of(node), node)


def _product(left: Value, right: Value, equation: str) -> tuple[Node, Node, str]:
    """Arguments of a product of the last dims; the dims before them broadcast."""
    nodes = node_of(left), node_of(right)
    operands, result = equation.split("->")
    dims_of_operands = operands.split(",")
    num_batch_dims = [len(shape_of(node)) - len(dims) for node, dims in zip(nodes, dims_of_operands, strict=True)]

    # Broadcasting aligns the last of the batch dims.
    batch = "abcdefgh"[: max(num_batch_dims)]
    terms: list[str] = []
    for num, dims in zip(num_batch_dims, dims_of_operands, strict=True):
        terms.append(batch[len(batch) - num :] + dims)
    return *nodes, f"{','.join(terms)}->{batch}{result}"


def _addmm(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    bias, *factors = args
    product = None if named else _matmul(builder, node, factors, named)
    if product is None:
        return None

    if isinstance(product, Apart) and len(shape_of_value(bias)) == 1 and product.dim == -1:
        bias = builder.as_pieces(node, bias, product.num, -1)
        return builder.apart(node, aten.add.Tensor, (product.node, bias), product.cut)

    terms = builder.whole(node, product), builder.whole(node, bias)
    return builder.call(node, aten.add.Tensor, terms, shape_of(node), node)


def _tensordot(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    *factors, x_dims, y_dims = args
    are_apart = [isinstance(factor, Apart) for factor in factors]
    if sum(are_apart) != 1:
        return None

    side = are_apart.index(True)
    value = factors[side]
    summed_dims: list[list[int]] = []
    for factor, dims in zip(factors, (x_dims, y_dims), strict=True):
        ndim = len(shape_of_value(factor))
        summed_dims.append([dim % ndim for dim in dims])

    result_dim = moved_to(node, args_of(node)[side], value.dim)
    if value.at in summed_dims[side] or result_dim is None:
        return None
    summed_dims[side] = _renumbered(value, summed_dims[side])
    return builder.apart(node, node.target, (*map(node_of, factors), *summed_dims), (value.num, result_dim))


def _renumbered(value: Apart, dims: Sequence[int]) -> list[int]:
    """Dims of a value as those of its node."""
    return [node_dim for dim in dims for node_dim in value.both(dim)]


def _along_others(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    """What looks along other dims, which are its second argument: their numbers alone change."""
    x, dim_or_dims, *rest = filled(args, None, None)
    if named or dim_or_dims is None or dim_or_dims == [] or not isinstance(x, Apart):
        return None

    has_several = isinstance(dim_or_dims, list | tuple)
    dims = [dim % len(x.shape) for dim in (dim_or_dims if has_several else [dim_or_dims])]
    result_dim = moved_to(node, args_of(node)[0], x.dim)
    if x.at in dims or result_dim is None:
        return None

    node_dims = _renumbered(x, sorted(dims))
    new_argument = node_dims if has_several else node_dims[0]
    return builder.apart(node, node.target, (x.node, new_argument, *rest), (x.num, result_dim))


def _cut(builder: Builder, node: Node, x: Apart, start: int, stop: int) -> Value:
    """Some pieces, by their numbers: one is a value by itself."""
    shape = list(shape_of(x.node))
    if stop - start == 1:
        del shape[x.at]
        return builder.call(node, aten.select.int, (x.node, x.at, start), tuple(shape), x.node)

    num = stop - start
    shape[x.at] = num
    pieces = builder.call(node, aten.slice.Tensor, (x.node, x.at, start, stop), tuple(shape), x.node)
    value_shape = list(x.shape)
    value_shape[x.at] = num * x.size
    return Apart(pieces, tuple(value_shape), num, x.dim)


def _split(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> list[Value] | None:
    x, sizes, dim = filled(args, None, None, 0)
    if not isinstance(x, Apart) or named.get("dim", dim) % len(x.shape) != x.at:
        return None
    length = x.shape[x.at]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if any(size % x.size or size == 0 for size in sizes):
        return None

    parts: list[Value] = []
    start = 0
    for size in sizes:
        stop = start + size // x.size
        parts.append(_cut(builder, node, x, start, stop))
        start = stop
    return parts


def _slice(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, dim, start, end, step = filled(args, None, 0, None, None, 1)
    if named or not isinstance(x, Apart):
        return None
    if dim % len(x.shape) != x.at:
        return _along_others(builder, node, (x, dim, start, end, step), named)

    start, end, step = slice(start, end, step).indices(x.shape[x.at])
    has_whole_pieces = start % x.size == 0 and end % x.size == 0
    if step != 1 or start >= end or not has_whole_pieces:
        return None
    return _cut(builder, node, x, start // x.size, end // x.size)


def _expand(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x = args[0]
    if not isinstance(x, Apart):
        return None
    shape = cut_shape(shape_of(node), *x.cut)
    return builder.apart(node, node.target, (x.node, list(shape)), x.cut)


def _cat(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    """Pieces that are put together, stay apart where that is wanted: each is padded to its place among them."""
    wanted = builder.wanted.get(node)
    shape = shape_of(node)
    tensors, dim = filled(args, None, 0)
    if wanted is None or named.get("dim", dim) % len(shape) != len(shape) + wanted[1]:
        return None
    num, at = wanted
    size = shape[at] // num

    # aten.cat takes a tensor of shape (0,) among others; such a one, like a part of a piece, has no pieces.
    for tensor in tensors:
        tensor_shape = shape_of_value(tensor)
        if len(tensor_shape) != len(shape) or tensor_shape[at] % size or not tensor_shape[at]:
            return None

    parts = [builder.as_pieces(node, tensor, shape_of_value(tensor)[at] // size, at) for tensor in tensors]
    return builder.apart(node, aten.cat.default, (parts, len(shape) + at), wanted)


def _slice_scatter(builder: Builder, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    """The gradient of a slice, which is zero elsewhere."""
    wanted = builder.wanted.get(node)
    shape = shape_of(node)
    x, part, dim, start, end, step = filled(args, None, None, 0, None, None, 1)
    if wanted is None or named or dim % len(shape) != len(shape) + wanted[1]:
        return None

    num, at = wanted
    size = shape[at] // num
    start, end, step = slice(start, end, step).indices(shape[at])
    if step != 1 or start % size or end % size or start >= end:
        return None

    zeros = builder.as_pieces(node, x, num, at)
    part = builder.as_pieces(node, part, (end - start) // size, at)
    pieces_dim = len(shape) + at
    return builder.apart(node, node.target, (zeros, part, pieces_dim, start // size, end // size), wanted)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(REDUCTIONS, _along_others),
    **dict.fromkeys(TURNS, _permute),
    **dict.fromkeys(PRODUCTS, _matmul),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "addmm": _addmm,
    "tensordot": _tensordot,
    "slice": _slice,
    "select": _along_others,
    "expand": _expand,
    "cat": _cat,
    "slice_scatter": _slice_scatter,
}
