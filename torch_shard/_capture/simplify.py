"""Algebra on a functional ATen graph: what the tracer had to write down, and what a compiler should see.

In a functional graph, copies and aliases mean nothing. Products arrive with their batch dims merged into one (`view`,
`bmm` or `mm`, `view`); merging a dim split over one mesh axis with a dim split over another forces the partitioner to
gather, so products get their own dims back.
"""

import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from torch_shard._common.fx import COPIES, RESHAPES, args_of, aten_name, call_before, dtype_of, shape_of, target_of
from torch_shard._common.overrides import REWRITES, rewrites

aten = torch.ops.aten

CHECKS = (aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default)

SWAPS = (aten.transpose.int, aten.permute.default, aten.t.default)


def simplify(graph: GraphModule) -> None:
    """Rewrite `graph` in place; values stay the same."""
    for node in list(graph.graph.nodes):
        if node.target in CHECKS:  # a compiled program cannot raise
            graph.graph.erase_node(node)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and (better := _rewrite(node)) is not None:
            node.replace_all_uses_with(better)
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _rewrite(node: Node) -> Node | None:
    expands_nothing = node.target is aten.expand.default and shape_of(node) == shape_of(args_of(node)[0])
    if expands_nothing or aten_name(node) in COPIES:
        source = args_of(node)[0]
        return source if dtype_of(node) == dtype_of(source) else None
    if node.target in RESHAPES:
        return _rewrite_view(node)
    if node.target in SWAPS:
        return _swap_below_view(node)

    for rewrite in REWRITES.get(target_of(node), ()):
        better = rewrite(node)
        if better is not None:
            return better
    return None


def _rewrite_view(node: Node) -> Node | None:
    """view(view(x)) is one view; a view to the same shape is nothing."""
    operand = args_of(node)[0]
    source = _source(operand)
    if shape_of(node) == shape_of(source):
        return source

    if source.target in (aten.mm.default, aten.addmm.default):
        product = _with_dims_of(node, source)
        if product is not None:
            return product
    return None if source is operand else _view(node, source, shape_of(node))


def _swap_below_view(node: Node) -> Node | None:
    """Swapping the last two dims of a merged batch: swap first, merge then. Of a matrix that was swapped, nothing."""
    merged = args_of(node)[0]
    if node.target is merged.target is aten.t.default:
        return args_of(merged)[0]
    source = _unmerged(merged, node) if _swaps_last_two_of_three(node) else None
    if source is None:
        return None

    rank = len(shape_of(source))
    shape = (*shape_of(source)[:-2], *shape_of(node)[-2:])
    swapped = call_before(node, aten.transpose.int, (source, rank - 2, rank - 1), shape)
    return _view(node, swapped, shape_of(node))


@rewrites(aten.bmm.default)
def _unmerge_bmm(node: Node) -> Node | None:
    """bmm(view(x), view(y)) with the same merged dims is one product with those dims kept apart."""
    left_arg, right_arg = args_of(node)
    left, right = _unmerged(left_arg, node), _unmerged(right_arg, node)
    if left is None or right is None or shape_of(left)[:-2] != shape_of(right)[:-2]:
        return None

    shape = (*shape_of(left)[:-1], shape_of(right)[-1])
    product = call_before(node, aten.matmul.default, (left, right), shape)
    return _view(node, product, shape_of(node))


@rewrites(aten.mm.default)
def _unflatten_mm(node: Node) -> Node | None:
    """A linear layer on `view(x, [B * T, C])` is one on x; the gradient of its weight sums over B and T."""
    left, right = args_of(node)
    source = _unflattened(left)
    if source is not None:
        shape = (*shape_of(source)[:-1], shape_of(right)[1])
        product = call_before(node, aten.matmul.default, (source, right), shape)
        return _view(node, product, shape_of(node))

    # The gradient of a weight: the transposed cotangent of the output by the input, each with its rows merged.
    if left.target is not aten.t.default:
        return None
    merged_cotangent, merged_x = args_of(left)[0], right
    cotangent = _unflattened_like(merged_cotangent, merged_x, node)
    x = _unflattened_like(merged_x, merged_cotangent, node)
    if cotangent is None or x is None or shape_of(cotangent)[:-1] != shape_of(x)[:-1]:
        return None
    dims = list(range(len(shape_of(x)) - 1))
    return call_before(node, aten.tensordot.default, (cotangent, x, dims, dims), shape_of(node))


def _with_dims_of(node: Node, product: Node) -> Node | None:
    """A linear layer whose input merges rows as it merges heads, and whose output parts rows again: on parted rows."""
    *bias, left, right = args_of(product)
    shape, source = shape_of(node), _source(left)
    is_layer = not product.kwargs and all(len(shape_of(each)) == 1 for each in bias)
    only_parts_rows = len(shape) >= 3 and shape[-1] == shape_of(right)[1]
    if not is_layer or not only_parts_rows or source is left:
        return None

    rows = _view(node, source, (*shape[:-1], shape_of(right)[0]))
    target = aten.addmm.default if bias else aten.matmul.default
    return call_before(node, target, (*bias, rows, right), shape)


@rewrites(aten.addmm.default)
def _unflatten_addmm(node: Node) -> Node | None:
    bias, left, right = args_of(node)
    source = _unflattened(left)
    if node.kwargs or len(shape_of(bias)) != 1 or source is None:
        return None
    shape = (*shape_of(source)[:-1], shape_of(right)[1])
    return _view(node, call_before(node, aten.addmm.default, (bias, source, right), shape), shape_of(node))


@rewrites(aten.sum.dim_IntList)
def _unflatten_sum(node: Node) -> Node | None:
    """The gradient of a bias sums over B and T too."""
    merged, dims = args_of(node)[:2]
    source = _unflattened(merged)
    if node.kwargs or list(dims or ()) != [0] or source is None:
        return None
    outer = list(range(len(shape_of(source)) - 1))
    total = call_before(node, aten.sum.dim_IntList, (source, outer), shape_of(source)[-1:])
    return _view(node, total, shape_of(node))


@rewrites(aten.linalg_lu_solve.default)
def _solve_for_determinant(node: Node) -> None:
    """The gradient of a determinant solves with the adjoint of what was factored, if that is not the transpose."""
    factors = args_of(node)[0]
    if factors.target is aten.add.Tensor:  # PyTorch shifts the factors of a singular matrix
        factors = args_of(factors)[0]

    # PyTorch factors a real matrix transposed where its strides favour that. JAX arrays have no strides, so ours always
    # is.
    is_output = factors.target is operator.getitem
    if is_output and args_of(factors)[0].target in (aten._linalg_det.default, aten._linalg_slogdet.default):
        node.kwargs = {**node.kwargs, "adjoint": dtype_of(node).is_complex}


def _unflattened(node: Node) -> Node | None:
    """The tensor of rank 3 or more that `node` is a view of with all but the last dim merged."""
    source = _source(node)
    merged_shape, shape = shape_of(node), shape_of(source)
    is_merged = len(merged_shape) == 2 and len(shape) > 2 and shape[-1] == merged_shape[-1]
    return source if is_merged else None


def _unflattened_like(matrix: Node, other: Node, at: Node) -> Node | None:
    """The tensor that a matrix is a view of; if that merges its rows in another way, with the dims of another's."""
    source = _unflattened(matrix)
    model = _unflattened(other)
    if source is not None or model is None or _source(matrix) is matrix:
        return source
    return _view(at, _source(matrix), (*shape_of(model)[:-1], shape_of(matrix)[-1]))


def _unmerged(node: Node, at: Node) -> Node | None:
    """What several merged matrices are a view of, with the merged dims apart.

    The dims of a matrix may be merged themselves: `torch.einsum` gives each factor dims of size one for the other's.
    """
    source = _source(node)
    merged_shape, shape = shape_of(node), shape_of(source)
    if len(merged_shape) != 3:
        return None

    for num_dims in range(2, len(shape) + 1):
        if math.prod(shape[:num_dims]) == merged_shape[0]:
            apart = (*shape[:num_dims], *merged_shape[1:])
            return source if shape == apart else _view(at, source, apart)
    return None


def _source(node: Node) -> Node:
    while node.op == "call_function" and node.target in RESHAPES:
        node = args_of(node)[0]
    return node


def _swaps_last_two_of_three(node: Node) -> bool:
    if len(shape_of(node)) != 3:
        return False
    if node.target is aten.permute.default:
        return [dim % 3 for dim in args_of(node)[1]] == [0, 2, 1]
    return node.target is aten.transpose.int and {dim % 3 for dim in args_of(node)[1:]} == {1, 2}


def _view(at: Node, source: Node, shape: tuple[int, ...]) -> Node:
    return call_before(at, aten.reshape.default, (source, list(shape)), shape)


def stride_in_order(graph: GraphModule) -> None:
    """Rewrite `graph`, not yet functional, in place; values and aliases stay the same.

    Each `as_strided` then has an operand whose elements lie in memory one after the other, in the order of its indices.
    What is written through `unfold` is written by strides: PyTorch's rule makes zeros of what no window holds.
    """
    for node in graph.graph.nodes:
        for view in _written_views(node):
            if view.target is aten.unfold.default:
                val = view.meta["val"]
                view.target = aten.as_strided.default
                view.args = (view.args[0], list(val.shape), list(val.stride()), val.storage_offset())

    for node in [node for node in graph.graph.nodes if node.target is aten.as_strided.default]:
        source, size, stride, *rest = args_of(node)
        offset = rest[0] if rest else None
        if offset is None:
            offset = source.meta["val"].storage_offset()
        node.args = (_in_order(node, source), size, stride, offset)
    graph.recompile()


def _written_views(node: Node) -> Iterator[Node]:
    """What a node writes to, and what that is a view of."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return

    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        view = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        while isinstance(view, Node):
            yield view
            base = view.args[0] if view.op == "call_function" and view.args else None
            view = base if isinstance(base, Node) and _memory(base) == _memory(view) else None


def _memory(node: Node) -> object:
    """Where the elements of what a node stands for are; None if it is no tensor."""
    val = node.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, torch.Tensor) else None


def _in_order(node: Node, source: Node) -> Node:
    """The tensor that `source` is a view of, its dims in the order of their strides."""
    whole = source
    while (order := _order(whole.meta["val"])) is None:
        parent = whole.args[0] if whole.op == "call_function" and whole.args else None
        if not isinstance(parent, Node) or _memory(parent) != _memory(source):
            raise NotImplementedError(
                f"as_strided of a tensor with strides {source.meta['val'].stride()}, whose memory a compiled program "
                "cannot reconstruct. Call .contiguous() before it, or index instead."
            )
        whole = parent
    if order == list(range(len(order))):
        return whole
    with node.graph.inserting_before(node):
        return node.graph.call_function(aten.permute.default, (whole, order))


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dims in which `tensor` fills its storage from start to end; None if it does not fill it."""
    num_bytes = tensor.numel() * tensor.element_size()
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))
    fills = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes
    return order if fills and tensor.permute(order).is_contiguous() else None
