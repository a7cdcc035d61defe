"""Operators on values in pieces: views, products, sums and what works element by element keep the pieces apart.

The product of a fused projection is split over devices by what is in each piece, so that cutting it moves nothing: of
two dims that a product sums over, or gives, one contraction is made. Where a piece is cut out, it is a value by itself.

A backward pass puts the gradients of the pieces together. That these are to stay apart is seen from what they are for:
`mark_pieces` follows the gradient of an entry in pieces back to where it is put together.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import Graph, Node

from torch_shard._common.fx import args_of, aten_name, shape_of
from torch_shard._common.operator_families import RESHAPES, is_pointwise
from torch_shard._common.pieces import InPieces, cut
from torch_shard._lowering.ops.constraints import CONSTRAINED
from torch_shard._lowering.ops.registry import TAKES_PIECES
from torch_shard._lowering.rows import as_pieces, merged

PIECES = "pieces"
"""Under this name the metadata of a node say in how many pieces which dim, from the end, of its value is to be."""

STORED = "stored"
"""Under this name those of a gradient say in how many pieces its entry is kept, along which dim; None if in none."""

MERGED = "merged"
"""Under this name they say that a value in pieces was put together there."""

logger = logging.getLogger(__name__)

Value = Any
Lowering = Callable[..., Value]
Cut = tuple[int, int]
"""Number of pieces, and the dim from the end."""

_SHAPES = frozenset({"unsqueeze", "squeeze"})


def operate_on_pieces(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    """The value of a node, of which a source is in pieces or whose result is to be."""
    wanted: Cut | None = node.meta.get(PIECES)
    rule = _rule_of(node)
    found = None if rule is None else rule(node, lowering, args, named)
    if found is None:
        _warn(node)
        found = lowering(*merged(list(args)), **merged(dict(named)))
    if wanted is None or isinstance(found, list | tuple):
        return found
    return as_pieces(found, *wanted)


def as_stored(node: Node, value: Value) -> Value:
    """The value of a node; a gradient in pieces if its entry is, and not otherwise."""
    if STORED not in node.meta:
        return value
    wanted: Cut | None = node.meta[STORED]
    return merged(value) if wanted is None else as_pieces(value, *wanted)


def _warn(node: Node) -> None:
    """Say once that a fused projection in pieces is merged for an operator, which moves it between devices."""
    if not node.meta.get(MERGED):
        node.meta[MERGED] = True
        where = node.meta.get("custom", {}).get("module", "")
        logger.warning(
            "A fused projection that is stored in pieces is put together for %s%s, and moves between devices there, as "
            "one that is not: only views, products, sums and operators on each element keep pieces apart, until the "
            "model cuts them. The results are right.",
            node.target,
            f" in {where}" * bool(where),
        )


def _rule_of(node: Node) -> Callable[[Node, Lowering, Sequence[Value], Mapping[str, Value]], Value] | None:
    name = aten_name(node)
    if node.target in RESHAPES or name in _SHAPES:
        return _view
    if node.target in TAKES_PIECES:
        return _as_given
    return RULES.get(name) or (_pointwise if is_pointwise(node) else None)


def _as_given(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    return lowering(*args, **named)


def _pointwise(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    leaves = jax.tree.leaves((args, named), is_leaf=_is_in_pieces)
    cuts = {(leaf.num, leaf.dim) for leaf in leaves if isinstance(leaf, InPieces)}
    if len(cuts) != 1 or (fake := node.meta.get("val")) is None or not isinstance(fake, torch.Tensor):
        return None
    ((num, dim),) = cuts

    def apart(leaf: Value) -> Value:
        if isinstance(leaf, InPieces):
            return leaf.array
        if not isinstance(leaf, jax.Array) or leaf.ndim < -dim:
            return leaf
        return (
            jnp.expand_dims(leaf, leaf.ndim + dim) if leaf.shape[dim] == 1 else leaf.reshape(cut(leaf.shape, num, dim))
        )

    args, named = jax.tree.map(apart, (list(args), dict(named)), is_leaf=_is_in_pieces)
    return InPieces(lowering(*args, **named), dim)


def _filled(args: Sequence[Value], *defaults: Value) -> list[Value]:
    """Positional arguments, with the defaults of those that are not given."""
    return [*args, *defaults[len(args) :]]


def _is_in_pieces(value: object) -> bool:
    return isinstance(value, InPieces)


def _view(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    """Elements stay in their order, so that pieces stay apart wherever the new shape has a dim of whole pieces."""
    x, shape = args[0], shape_of(node)
    array = x.array if isinstance(x, InPieces) else x
    found: Cut | None = node.meta.get(PIECES)
    if found is None and isinstance(x, InPieces):
        found = _cut_in_view(x.shape, (x.num, x.dim), shape)
    return array.reshape(shape) if found is None else InPieces(array.reshape(cut(shape, *found)), found[1])


def _cut_in_view(old: tuple[int, ...], given: Cut, new: tuple[int, ...]) -> Cut | None:
    """Where the pieces of a value of shape `old` are in its view; None where they have a dim of their own, or none."""
    num, dim = given
    before, size = math.prod(old[: len(old) + dim]), old[dim]
    for at, found in enumerate(new):
        if math.prod(new[:at]) == before and found > num and found % num == 0 and size % found == 0:
            return num, at - len(new)
    return None


def _permute(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, order = args[0], _order(node)
    if not isinstance(x, InPieces):
        return None
    at = x.ndim + x.dim
    return InPieces(jnp.transpose(x.array, [i for dim in order for i in _apart(dim, at)]), order.index(at) - x.ndim)


def _order(node: Node) -> list[int]:
    """The order of dims that a node gives."""
    _, *rest = args_of(node)
    ndim = len(shape_of(node))
    if aten_name(node) == "permute":
        return [dim % ndim for dim in rest[0]]
    order = list(range(ndim))
    first, second = (0, ndim - 1) if aten_name(node) == "t" else (dim % ndim for dim in rest)
    order[first], order[second] = order[second], order[first]
    return order


def _apart(dim: int, at: int) -> tuple[int, ...]:
    """The dims that stand for `dim` where dim `at` is two."""
    return (dim, dim + 1) if dim == at else (dim + (dim > at),)


def _matmul(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    left, right = args[:2]
    if min(left.ndim, right.ndim) < 2:
        return None
    if isinstance(left, InPieces) and left.dim == -2 and not isinstance(right, InPieces):
        return InPieces(jnp.einsum("...pij,...jk->...pik", left.array, right), -2)
    if isinstance(right, InPieces) and right.dim == -1 and not isinstance(left, InPieces):
        return InPieces(jnp.einsum("...ij,...jpk->...ipk", left, right.array), -1)
    summed = [v.num for v, dim in ((left, -1), (right, -2)) if isinstance(v, InPieces) and v.dim == dim]
    if not summed or any(isinstance(v, InPieces) and v.dim != dim for v, dim in ((left, -1), (right, -2))):
        return None
    left, right = as_pieces(left, summed[0], -1), as_pieces(right, summed[0], -2)
    return jnp.einsum("...ipj,...pjk->...ik", left.array, right.array)


def _addmm(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    bias, *factors = args
    product = None if named else _matmul(node, lowering, factors, named)
    if not isinstance(product, InPieces):
        return None if product is None else product + merged(bias)
    if bias.ndim != 1 or product.dim != -1:
        return merged(product) + merged(bias)
    return InPieces(product.array + as_pieces(bias, product.num, -1).array, -1)


def _tensordot(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, y, dims_x, dims_y = args
    dims_x, dims_y = [dim % x.ndim for dim in dims_x], [dim % y.ndim for dim in dims_y]
    ats = [v.ndim + v.dim if isinstance(v, InPieces) else -1 for v in (x, y)]
    if -1 not in ats or any(at in dims for at, dims in zip(ats, (dims_x, dims_y), strict=True)):
        return None
    free = [*((0, dim) for dim in range(x.ndim) if dim not in dims_x)]
    free += [*((1, dim) for dim in range(y.ndim) if dim not in dims_y)]
    side = 0 if isinstance(x, InPieces) else 1
    arrays = [v.array if isinstance(v, InPieces) else v for v in (x, y)]
    sums = [[dim + (0 <= at < dim) for dim in dims] for at, dims in zip(ats, (dims_x, dims_y), strict=True)]
    return InPieces(jnp.tensordot(arrays[0], arrays[1], sums), free.index((side, ats[side])) - len(free))


def _sum(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, dims, keep = _filled(args, None, None, False)
    if named or not dims or not isinstance(x, InPieces):
        return None
    at, taken = x.ndim + x.dim, {dim % x.ndim for dim in dims}
    if at in taken:
        return None
    total = lowering(x.array, [i for dim in sorted(taken) for i in _apart(dim, at)], keep)
    return InPieces(total, x.dim if keep else x.dim + sum(dim > at for dim in taken))


def _cut(x: InPieces, start: int, stop: int) -> Value:
    """Some pieces, by their numbers: one is a value by itself."""
    axis = x.array.ndim + x.dim - 1
    if stop - start == 1:
        return jax.lax.index_in_dim(x.array, start, axis, keepdims=False)
    return InPieces(jax.lax.slice_in_dim(x.array, start, stop, axis=axis), x.dim)


def _split(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, sizes, dim = _filled(args, None, None, 0)
    dim = named.get("dim", dim) % x.ndim
    if not isinstance(x, InPieces) or dim != x.ndim + x.dim:
        return None
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - start) for start in range(0, x.shape[dim], sizes)]
    if any(size % x.size or size == 0 for size in sizes):
        return None
    ends = [sum(sizes[: i + 1]) // x.size for i in range(len(sizes))]
    return [_cut(x, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _slice(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, dim, start, end, step = _filled(args, None, 0, None, None, 1)
    if named or not isinstance(x, InPieces):
        return None
    at, dim = x.ndim + x.dim, dim % x.ndim
    if dim != at:
        return InPieces(lowering(x.array, *_apart(dim, at), start, end, step), x.dim)
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    aligned = step == 1 and start % x.size == end % x.size == 0 and start < end
    return _cut(x, start // x.size, end // x.size) if aligned else None


def _select(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, dim, index = args
    if not isinstance(x, InPieces) or (dim := dim % x.ndim) == (at := x.ndim + x.dim):
        return None
    return InPieces(lowering(x.array, *_apart(dim, at), index), x.dim if dim < at else x.dim + 1)


def _expand(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    x, shape = args[0], shape_of(node)
    return InPieces(jnp.broadcast_to(x.array, cut(shape, x.num, x.dim)), x.dim) if isinstance(x, InPieces) else None


def _cat(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    """Pieces that are put together, stay apart where that is wanted: each is padded to its place among them."""
    wanted: Cut | None = node.meta.get(PIECES)
    tensors, dim = _filled(args, None, 0)
    if wanted is None or named.get("dim", dim) % len(shape_of(node)) != len(shape_of(node)) + wanted[1]:
        return None
    num, at = wanted
    size = shape_of(node)[at] // num
    counts = [tensor.shape[at] // size if tensor.ndim == len(shape_of(node)) else 0 for tensor in tensors]
    if any(tensor.shape[at] % size for tensor in tensors if tensor.ndim == len(shape_of(node))) or 0 in counts:
        return None
    parts = [as_pieces(tensor, count, at).array for tensor, count in zip(tensors, counts, strict=True)]
    return InPieces(jnp.concatenate(parts, axis=parts[0].ndim + at - 1), at)


def _slice_scatter(node: Node, lowering: Lowering, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
    """The gradient of a slice, which is zero elsewhere."""
    wanted: Cut | None = node.meta.get(PIECES)
    x, part, dim, start, end, step = _filled(args, None, None, 0, None, None, 1)
    if wanted is None or named or dim % x.ndim != x.ndim + wanted[1]:
        return None
    num, at = wanted
    size = x.shape[at] // num
    start, end, step = slice(start, end, step).indices(x.shape[at])
    if step != 1 or start % size or end % size or start >= end:
        return None
    apart, part = as_pieces(x, num, at).array, as_pieces(part, (end - start) // size, at).array
    axis = part.ndim + at - 1
    before = jax.lax.slice_in_dim(apart, 0, start // size, axis=axis)
    return InPieces(jnp.concatenate([before, part, jax.lax.slice_in_dim(apart, end // size, num, axis=axis)], axis), at)


RULES: dict[str, Callable[[Node, Lowering, Sequence[Value], Mapping[str, Value]], Value]] = {
    **dict.fromkeys(("t", "transpose", "permute"), _permute),
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "addmm": _addmm,
    "tensordot": _tensordot,
    "sum": _sum,
    "slice": _slice,
    "select": _select,
    "expand": _expand,
    "cat": _cat,
    "slice_scatter": _slice_scatter,
}


def mark_pieces(graph: Graph, inputs: Mapping[Node, Cut], grads: Iterable[tuple[Node, Cut | None]]) -> None:
    """Note on the nodes that put gradients of pieces together that these are to stay apart."""
    known = dict(inputs)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if len(sources) == 1 and sources[0] in known and (aten_name(node) in _TURNS or _keeps_dims(node)):
            known[node] = _through(node, known[sources[0]])
        elif aten_name(node) in ("mm", "bmm", "matmul"):
            left, right = args_of(node)
            for factor, dim, other, summed in ((left, -1, right, -2), (right, -2, left, -1)):
                if factor in known and known[factor][1] == dim:
                    _want(other, (known[factor][0], summed))
    for node, wanted in grads:
        node.meta[STORED] = wanted
        if wanted is not None:
            _want(node, wanted)


def _keeps_dims(node: Node) -> bool:
    return is_pointwise(node) or node.target is CONSTRAINED


_TURNS = ("t", "transpose", "permute")


def _through(node: Node, given: Cut) -> Cut:
    if aten_name(node) not in _TURNS:
        return given
    ndim = len(shape_of(node))
    return given[0], _order(node).index(ndim + given[1]) - ndim


def _want(node: Node, wanted: Cut) -> None:
    """Follow what is wanted in pieces back to where it is made."""
    waiting = [(node, wanted)]
    while waiting:
        node, wanted = waiting.pop()
        if node.op != "call_function" or PIECES in node.meta or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if aten_name(node) in ("cat", "slice_scatter") or node.target in RESHAPES:
            node.meta[PIECES] = wanted
        waiting += _sources(node, wanted)


def _sources(node: Node, wanted: Cut) -> list[tuple[Node, Cut]]:
    """The sources of which the dim in pieces is, and where it is there."""
    (num, dim), name, shape = wanted, aten_name(node), shape_of(node)
    args = list(args_of(node))
    at = len(shape) + dim
    if name in _TURNS:
        return [(args[0], (num, _order(node)[at] - len(shape)))]
    if node.target in RESHAPES:
        found = _cut_in_view(shape, wanted, shape_of(args[0]))
        return [] if found is None else [(args[0], found)]
    if name in ("mm", "bmm", "matmul"):
        return [(args[0], (num, -2)) if dim == -2 else (args[1], (num, -1))] if dim >= -2 else []
    if name == "tensordot":
        x, y, *dims = args
        pairs = [
            (v, i) for v, taken in zip((x, y), dims, strict=True) for i in range(len(shape_of(v))) if i not in taken
        ]
        source, place = pairs[at]
        return [(source, (num, place - len(shape_of(source))))]
    if name == "sum" and len(args) > 1 and args[1]:
        ndim = len(shape_of(args[0]))
        taken = {d % ndim for d in args[1]}
        left = list(range(ndim)) if _filled(args, None, None, False)[2] else [i for i in range(ndim) if i not in taken]
        return [] if left[at] in taken else [(args[0], (num, left[at] - ndim))]
    if name == "slice_scatter":
        return [(args[0], wanted)]
    if name == "cat":
        elsewhere = _filled(args, None, 0)[1] % len(shape) != at
        return [(source, wanted) for source in args[0]] if elsewhere else []
    if _keeps_dims(node):
        sources = [s for s in node.all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor)]
        return [(s, wanted) for s in sources if len(shape_of(s)) >= -dim and shape_of(s)[dim] == shape[at]]
    return []
