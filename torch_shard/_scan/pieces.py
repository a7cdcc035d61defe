"""Fused projections that are stored in pieces: a graph in which the pieces have a dim of their own.

The product of such a projection is split over devices by what is in each piece, so that cutting it moves nothing: of
two dims that a product sums over, or gives, one contraction is made. Views, products, sums and what works element by
element are rewritten so, until the model's own split takes the pieces apart; where one is cut out, it is a value by
itself. For all other operators the pieces are put together, which is right, and slower.

A backward pass puts the gradients of the pieces together. That these are to stay apart is seen from what they are for:
the gradient of an entry in pieces is followed back to where it is put together.
"""

import dataclasses
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_shard._common.fx import args_of, aten_name, dtype_of, fill_in, is_random, outputs_of, shape_of
from torch_shard._common.operator_families import RESHAPES, is_pointwise
from torch_shard._lowering import CONSTRAINED, own_of, spec_apart
from torch_shard._scan.dims import moved
from torch_shard._scan.region import LAYER, LAYER_BACKWARD, Call

logger = logging.getLogger(__name__)

Cut = tuple[int, int]
"""Number of pieces, and the dim from the end."""

aten, ours = torch.ops.aten, torch.ops.torch_shard

_TURNS = ("t", "transpose", "permute")
_SHAPES = frozenset({"unsqueeze", "squeeze"})
_PRODUCTS = ("mm", "bmm", "matmul")


@dataclasses.dataclass(frozen=True)
class Apart:
    """A value with a dim in pieces.

    Attributes:
        node: `(..., num, n, ...)`, where the value is `(..., num * n, ...)`.
        num: Number of pieces.
        dim: Of the value, and of what is in a piece; from the end, so negative.
    """

    node: Node
    num: int
    dim: int

    @property
    def cut(self) -> Cut:
        return self.num, self.dim

    @property
    def ndim(self) -> int:
        """Number of dims of the value."""
        return len(shape_of(self.node)) - 1

    @property
    def at(self) -> int:
        """The dim, from the first; in the node, that of the pieces."""
        return self.ndim + self.dim

    @property
    def size(self) -> int:
        """Of the dim in one piece."""
        return shape_of(self.node)[self.dim]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the value."""
        found = shape_of(self.node)
        return (*found[: self.at], self.num * self.size, *found[self.at + 2 :])


Value = Node | Apart
Rule = Callable[["_Rewriter", Node, Sequence[Any], Mapping[str, Any]], Any]


def cut_shape(shape: tuple[int, ...], num: int, dim: int) -> tuple[int, ...]:
    """A shape with its dim `dim`, from the end, in so many pieces."""
    at = len(shape) + dim
    return (*shape[:at], num, shape[at] // num, *shape[at + 1 :])


def take_apart(
    graph: Graph, inputs: Mapping[Node, Cut], grads: Mapping[int, Cut | None], calls: Mapping[int, Call]
) -> None:
    """Rewrite a graph for entries in pieces.

    Args:
        graph: Functional.
        inputs: Those that are given in pieces.
        grads: Of outputs that are gradients, whether they are to be in pieces too.
        calls: The calls of layers in it.
    """
    outputs = outputs_of(graph)
    wanted = _wanted(graph, inputs, {outputs[at]: cut for at, cut in grads.items() if cut is not None})
    rewriter = _Rewriter(wanted, calls)
    for node in list(graph.nodes):
        if node in inputs:
            rewriter.keep(node, inputs[node])
        elif node.op == "call_function":
            rewriter.rewrite(node)
    end = graph.output_node()
    for at, node in enumerate(outputs):
        if isinstance(node, Node):
            cut = grads.get(at)
            value = rewriter.value(node)
            outputs[at] = rewriter.whole(end, value) if cut is None else rewriter.as_pieces(end, value, *cut)
    end.args = (tuple(outputs),)
    graph.eliminate_dead_code()


class _Rewriter:
    def __init__(self, wanted: Mapping[Node, Cut], calls: Mapping[int, Call]) -> None:
        self.wanted, self._calls = wanted, calls
        self._values: dict[Node, Any] = {}
        """What stands for nodes: of one with several results, a list."""
        self._merged: dict[Node, Node] = {}
        self._layers: dict[int, list[Node]] = {}
        self._warned: set[str] = set()

    def value(self, node: Node) -> Any:
        return self._values.get(node, node)

    def keep(self, node: Node, cut: Cut) -> None:
        """Note that a node gives its value in pieces."""
        node.meta["val"] = _empty(cut_shape(shape_of(node), *cut), node)
        self._values[node] = Apart(node, *cut)

    def rewrite(self, node: Node) -> None:
        if node.target is LAYER:
            self._layers[args_of(node)[0]] = list(args_of(node)[1])
            for source in node.all_input_nodes:
                if isinstance(self.value(source), Apart):
                    node.replace_input_with(source, self.value(source).node)
        elif node.target is operator.getitem:
            self._take(node)
        elif node in self.wanted or any(source in self._values for source in node.all_input_nodes):
            self._operate(node)

    def _take(self, node: Node) -> None:
        source, index = args_of(node)
        if source in self._values:
            self._put(node, self._values[source][index])
        elif source.target is LAYER_BACKWARD:
            number = args_of(source)[0]
            argument = self.value(self._layers[number][list(self._calls[number].gradients)[index]])
            if isinstance(argument, Apart):
                self.keep(node, argument.cut)

    def _operate(self, node: Node) -> None:
        rule = None if is_random(node) or own_of(node) is not None else _rule_of(node)
        args, named = fill_in((node.args, node.kwargs), self.value)
        found = None if rule is None else rule(self, node, args, named)
        if found is None:
            self._merge_sources(node)
            found = node
        if (cut := self.wanted.get(node)) is not None and not isinstance(found, list):
            found = Apart(self.as_pieces(_after(node), found, *cut), *cut)
        self._put(node, found)

    def _put(self, node: Node, found: Any) -> None:
        """Let what was found stand for a node."""
        if isinstance(found, Node):
            if found is not node:
                node.replace_all_uses_with(found)
        else:
            self._values[node] = found

    def _merge_sources(self, node: Node) -> None:
        for source in node.all_input_nodes:
            if isinstance(value := self.value(source), Apart):
                self._warn(node)
                node.replace_input_with(source, self.whole(node, value))

    def _warn(self, node: Node) -> None:
        where = node.meta.get("custom", {}).get("module", "")
        if (what := f"{node.target}{f' in {where}' * bool(where)}") not in self._warned:
            self._warned.add(what)
            logger.warning(
                "A fused projection that is stored in pieces is put together for %s, and moves between devices there, "
                "as one that is not: only views, products, sums and operators on each element keep pieces apart, until "
                "the model cuts them. The results are right.",
                what,
            )

    def call(self, at: Node, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], like: Node, **named: Any):
        """A new node before `at`, of that shape, with the dtype of `like`."""
        with at.graph.inserting_before(at):
            node = at.graph.call_function(target, args, named)
        notes = {name: value for name, value in at.meta.items() if not name.startswith("random_")}
        node.meta = {**notes, "val": _empty(shape, like)}
        return node

    def reshaped(self, at: Node, node: Node, shape: tuple[int, ...]) -> Node:
        return self.call(at, aten.reshape.default, (node, list(shape)), shape, node)

    def whole(self, at: Node, value: Value) -> Node:
        """A value, put together if it is in pieces, of which each device has all then.

        XLA's partitioner errs where split dims become one, or one becomes two (tests/system/test_partitioner.py).
        """
        if isinstance(value, Node):
            return value
        if value.node not in self._merged:
            dims = [value.at, value.at + 1]
            held = self.call(at, ours.whole_along.default, (value.node, dims), shape_of(value.node), value.node)
            self._merged[value.node] = self.reshaped(at, held, value.shape)
        return self._merged[value.node]

    def as_pieces(self, at: Node, value: Value, num: int, dim: int) -> Node:
        """A value in pieces, of which each device has all if they were not apart."""
        if isinstance(value, Apart) and value.cut == (num, dim):
            return value.node
        node = self.whole(at, value)
        shape = shape_of(node)
        if num > 1:
            node = self.call(at, ours.whole_along.default, (node, [len(shape) + dim]), shape, node)
        return self.reshaped(at, node, cut_shape(shape, num, dim))

    def einsum(self, at: Node, left: Value, right: Value, cut: Cut | None, *, sums: str) -> Value:
        """A product of the last two dims of two values, in which pieces keep the letter p."""
        letters = "abcdefgh"[: max(_ndim(left), _ndim(right)) - 2]
        dims = [*letters, *("i", "k")]
        inner = (
            f"{letters[len(letters) - _ndim(v) + 2 :]}{part}"
            for v, part in zip((left, right), sums.split(), strict=True)
        )
        given = ",".join(inner)
        if cut is not None:
            dims.insert(len(dims) + cut[1], "p")
        shape = shape_of(at) if cut is None else cut_shape(shape_of(at), *cut)
        nodes = tuple(v.node if isinstance(v, Apart) else v for v in (left, right))
        found = self.call(at, ours.einsum.default, (*nodes, f"{given}->{''.join(dims)}"), shape, at)
        return found if cut is None else Apart(found, *cut)


def _empty(shape: tuple[int, ...], like: Node) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype_of(like), device="meta")


def _after(node: Node) -> Node:
    return node.next


def _ndim(value: Value) -> int:
    return value.ndim if isinstance(value, Apart) else len(shape_of(value))


def _shape(value: Value) -> tuple[int, ...]:
    return value.shape if isinstance(value, Apart) else shape_of(value)


def _rule_of(node: Node) -> Rule | None:
    name = aten_name(node)
    if node.target in RESHAPES or name in _SHAPES:
        return _view
    if node.target is CONSTRAINED:
        return _constrained
    return RULES.get(name) or (_pointwise if is_pointwise(node) else None)


def _filled(args: Sequence[Any], *defaults: Any) -> list[Any]:
    """Positional arguments, with the defaults of those that are not given."""
    return [*args, *defaults[len(args) :]]


def _constrained(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, spec, *rest = args
    if not isinstance(x, Apart):
        return None
    given = (x.node, spec_apart(spec, x.ndim, x.at), *rest)
    return Apart(rewriter.call(node, node.target, given, shape_of(x.node), node, **named), *x.cut)


def _pointwise(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    values = [rewriter.value(source) for source in node.all_input_nodes]
    cuts = {value.cut for value in values if isinstance(value, Apart)}
    if len(cuts) != 1 or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    ((num, dim),) = cuts

    def apart(source: Node) -> Node:
        value = rewriter.value(source)
        if isinstance(value, Apart):
            return value.node
        shape = shape_of(value)
        if len(shape) < -dim:
            return value
        return rewriter.reshaped(node, value, cut_shape(shape, 1 if shape[dim] == 1 else num, dim))

    args, named = fill_in((node.args, dict(node.kwargs)), apart)
    shape = cut_shape(shape_of(node), num, dim)
    return Apart(rewriter.call(node, node.target, tuple(args), shape, node, **named), num, dim)


def _view(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value:
    """Elements stay in their order, so that pieces stay apart wherever the new shape has a dim of whole pieces."""
    x, shape = args[0], shape_of(node)
    found = rewriter.wanted.get(node)
    if found is None and isinstance(x, Apart):
        found = _cut_in_view(x.shape, x.cut, shape)
    source = x.node if isinstance(x, Apart) else x
    new = rewriter.reshaped(node, source, shape if found is None else cut_shape(shape, *found))
    return new if found is None else Apart(new, *found)


def _cut_in_view(old: tuple[int, ...], given: Cut, new: tuple[int, ...]) -> Cut | None:
    """Where the pieces of a value of shape `old` are in its view; None where they have a dim of their own, or none."""
    num, dim = given
    before, size = math.prod(old[: len(old) + dim]), old[dim]
    for at, found in enumerate(new):
        if math.prod(new[:at]) == before and found > num and found % num == 0 and size % found == 0:
            return num, at - len(new)
    return None


def _permute(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, order = args[0], _order(node)
    if not isinstance(x, Apart):
        return None
    dims = [i for dim in order for i in _both(dim, x.at)]
    shape = tuple(shape_of(x.node)[i] for i in dims)
    new = rewriter.call(node, aten.permute.default, (x.node, dims), shape, node)
    return Apart(new, x.num, order.index(x.at) - x.ndim)


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


def _both(dim: int, at: int) -> tuple[int, ...]:
    """The dims that stand for `dim` where dim `at` is two."""
    return (dim, dim + 1) if dim == at else (dim + (dim > at),)


def _matmul(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    left, right = args[:2]
    if min(_ndim(left), _ndim(right)) < 2:
        return None
    dims = [v.dim if isinstance(v, Apart) else None for v in (left, right)]
    if dims == [-2, None]:
        return rewriter.einsum(node, left, right, left.cut, sums="pij jk")
    if dims == [None, -1]:
        return rewriter.einsum(node, left, right, right.cut, sums="ij jpk")
    if dims not in ([-1, None], [None, -2], [-1, -2]):
        return None
    num = next(v.num for v in (left, right) if isinstance(v, Apart))
    left, right = (Apart(rewriter.as_pieces(node, v, num, dim), num, dim) for v, dim in ((left, -1), (right, -2)))
    return rewriter.einsum(node, left, right, None, sums="ipj pjk")


def _addmm(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    bias, *factors = args
    product = None if named else _matmul(rewriter, node, factors, named)
    if product is None:
        return None
    if isinstance(product, Node) or _ndim(bias) != 1 or product.dim != -1:
        both = (rewriter.whole(node, product), rewriter.whole(node, bias))
        return rewriter.call(node, aten.add.Tensor, both, shape_of(node), node)
    both = (product.node, rewriter.as_pieces(node, bias, product.num, -1))
    return Apart(rewriter.call(node, aten.add.Tensor, both, shape_of(product.node), node), *product.cut)


def _tensordot(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, y, *dims = args
    dims = [[dim % _ndim(v) for dim in of] for v, of in zip((x, y), dims, strict=True)]
    ats = [v.at if isinstance(v, Apart) else -1 for v in (x, y)]
    if -1 not in ats or any(at in of for at, of in zip(ats, dims, strict=True)):
        return None
    free = [(side, dim) for side, v in enumerate((x, y)) for dim in range(_ndim(v)) if dim not in dims[side]]
    side = 0 if isinstance(x, Apart) else 1
    value = (x, y)[side]
    cut = value.num, free.index((side, ats[side])) - len(free)
    sums = [[dim + (0 <= at < dim) for dim in of] for at, of in zip(ats, dims, strict=True)]
    nodes = (v.node if isinstance(v, Apart) else v for v in (x, y))
    return Apart(rewriter.call(node, node.target, (*nodes, *sums), cut_shape(shape_of(node), *cut), node), *cut)


def _sum(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, dims, keep = _filled(args, None, None, False)
    if named or not dims or not isinstance(x, Apart):
        return None
    taken = {dim % x.ndim for dim in dims}
    if x.at in taken:
        return None
    cut = x.num, x.dim if keep else x.dim + sum(dim > x.at for dim in taken)
    given = (x.node, [i for dim in sorted(taken) for i in _both(dim, x.at)], keep)
    return Apart(rewriter.call(node, node.target, given, cut_shape(shape_of(node), *cut), node), *cut)


def _cut(rewriter: _Rewriter, node: Node, x: Apart, start: int, stop: int) -> Value:
    """Some pieces, by their numbers: one is a value by itself."""
    shape = list(shape_of(x.node))
    if stop - start == 1:
        del shape[x.at]
        return rewriter.call(node, aten.select.int, (x.node, x.at, start), tuple(shape), x.node)
    shape[x.at] = stop - start
    found = rewriter.call(node, aten.slice.Tensor, (x.node, x.at, start, stop), tuple(shape), x.node)
    return Apart(found, stop - start, x.dim)


def _split(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> list[Value] | None:
    x, sizes, dim = _filled(args, None, None, 0)
    if not isinstance(x, Apart) or named.get("dim", dim) % x.ndim != x.at:
        return None
    length = x.num * x.size
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if any(size % x.size or size == 0 for size in sizes):
        return None
    ends = [sum(sizes[: i + 1]) // x.size for i in range(len(sizes))]
    return [_cut(rewriter, node, x, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _slice(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, dim, start, end, step = _filled(args, None, 0, None, None, 1)
    if named or not isinstance(x, Apart):
        return None
    dim = dim % x.ndim
    if dim != x.at:
        given = (x.node, *_both(dim, x.at), start, end, step)
        return Apart(rewriter.call(node, node.target, given, cut_shape(shape_of(node), *x.cut), node), *x.cut)
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    aligned = step == 1 and start % x.size == end % x.size == 0 and start < end
    return _cut(rewriter, node, x, start // x.size, end // x.size) if aligned else None


def _select(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x, dim, index = args
    if not isinstance(x, Apart) or (dim := dim % x.ndim) == x.at:
        return None
    cut = x.num, x.dim if dim < x.at else x.dim + 1
    given = (x.node, *_both(dim, x.at), index)
    return Apart(rewriter.call(node, node.target, given, cut_shape(shape_of(node), *cut), node), *cut)


def _expand(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    x = args[0]
    if not isinstance(x, Apart):
        return None
    shape = cut_shape(shape_of(node), *x.cut)
    return Apart(rewriter.call(node, node.target, (x.node, list(shape)), shape, node), *x.cut)


def _cat(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    """Pieces that are put together, stay apart where that is wanted: each is padded to its place among them."""
    wanted, shape = rewriter.wanted.get(node), shape_of(node)
    tensors, dim = _filled(args, None, 0)
    if wanted is None or named.get("dim", dim) % len(shape) != len(shape) + wanted[1]:
        return None
    num, at = wanted
    size = shape[at] // num
    lengths = [_shape(tensor)[at] if _ndim(tensor) == len(shape) else 0 for tensor in tensors]
    if any(length % size or not length for length in lengths):
        return None
    parts = [rewriter.as_pieces(node, t, length // size, at) for t, length in zip(tensors, lengths, strict=True)]
    dim = len(shape) + at
    return Apart(rewriter.call(node, aten.cat.default, (parts, dim), cut_shape(shape, *wanted), node), *wanted)


def _slice_scatter(rewriter: _Rewriter, node: Node, args: Sequence[Any], named: Mapping[str, Any]) -> Value | None:
    """The gradient of a slice, which is zero elsewhere."""
    wanted, shape = rewriter.wanted.get(node), shape_of(node)
    x, part, dim, start, end, step = _filled(args, None, None, 0, None, None, 1)
    if wanted is None or named or dim % len(shape) != len(shape) + wanted[1]:
        return None
    num, at = wanted
    size = shape[at] // num
    start, end, step = slice(start, end, step).indices(shape[at])
    if step != 1 or start % size or end % size or start >= end:
        return None
    whole, part = rewriter.as_pieces(node, x, num, at), rewriter.as_pieces(node, part, (end - start) // size, at)
    given = (whole, part, len(shape) + at, start // size, end // size)
    return Apart(rewriter.call(node, node.target, given, cut_shape(shape, *wanted), node), *wanted)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_TURNS, _permute),
    **dict.fromkeys(_PRODUCTS, _matmul),
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


def _wanted(graph: Graph, inputs: Mapping[Node, Cut], grads: Mapping[Any, Cut]) -> dict[Node, Cut]:
    """The nodes that put pieces together which are to stay apart: gradients of entries, and factors of pieces."""
    known, waiting = dict(inputs), [*grads.items()]
    for node in graph.nodes:
        if aten_name(node) in _PRODUCTS:
            left, right = args_of(node)
            for factor, dim, other, summed in ((left, -1, right, -2), (right, -2, left, -1)):
                if factor in known and known[factor][1] == dim:
                    waiting.append((other, (known[factor][0], summed)))
        elif len(node.all_input_nodes) == 1 and (source := node.all_input_nodes[0]) in known and _keeps_size(node):
            num, dim = known[source]
            known[node] = num, _moved_to(node, source, dim) or dim
    return _followed(waiting)


def _keeps_size(node: Node) -> bool:
    return is_pointwise(node) or node.target is CONSTRAINED or aten_name(node) in _TURNS


def _moved_to(node: Node, source: Node, dim: int) -> int | None:
    """Where a dim of a source is in a result, both from the end."""
    (found,) = moved(node, source, len(shape_of(source)) + dim)
    return None if found is None else found - len(shape_of(node))


def _followed(waiting: list[tuple[Node, Cut]]) -> dict[Node, Cut]:
    """Follow what is wanted in pieces back to where it is made."""
    found: dict[Node, Cut] = {}
    while waiting:
        node, cut = waiting.pop()
        if node.op != "call_function" or node in found or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if aten_name(node) in ("cat", "slice_scatter") or node.target in RESHAPES:
            found[node] = cut
        waiting += _sources(node, cut)
    return found


def _sources(node: Node, wanted: Cut) -> list[tuple[Node, Cut]]:
    """The sources of which the dim in pieces is, and where it is there."""
    num, dim = wanted
    if node.target in RESHAPES:
        source = args_of(node)[0]
        found = _cut_in_view(shape_of(node), wanted, shape_of(source))
        return [] if found is None else [(source, found)]
    if _rule_of(node) is None or (aten_name(node) == "cat" and _puts_together(node, dim)):
        return []
    given = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    if aten_name(node) == "slice_scatter":
        given = given[:1]
    pairs = ((source, at) for source in given for at in range(-len(shape_of(source)), 0))
    size = shape_of(node)[dim]
    return [(x, (num, at)) for x, at in pairs if shape_of(x)[at] == size and _moved_to(node, x, at) == dim]


def _puts_together(node: Node, dim: int) -> bool:
    ndim = len(shape_of(node))
    return _filled(args_of(node), None, 0)[1] % ndim == ndim + dim
