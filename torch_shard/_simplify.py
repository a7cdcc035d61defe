"""Algebra on a functional ATen graph: what the tracer had to write down, and what a compiler should see.

In a functional graph, copies and aliases mean nothing. Products arrive with their batch dims merged into one (`view`,
`bmm` or `mm`, `view`); merging a dim split over one mesh axis with a dim split over another forces the partitioner to
gather, so products get their own dims back.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_shard import _kernels  # noqa: F401  (defines the operator that cross entropy becomes)
from torch_shard._graph import args_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
COPIES = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.contiguous.default,
)
CHECKS = (aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default)
NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
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
    if node.target in COPIES or (node.target is aten.expand.default and _shape(node) == _shape(args_of(node)[0])):
        return args_of(node)[0] if _dtype(node) == _dtype(args_of(node)[0]) else None
    if node.target in VIEWS:
        return _rewrite_view(node)
    if node.target in SWAPS:
        return _swap_below_view(node)
    rewrite = _PRODUCTS.get(node.target)
    return rewrite(node) if rewrite is not None else None


def _rewrite_view(node: Node) -> Node | None:
    """view(view(x)) is one view; a view to the same shape is nothing."""
    source = _source(args_of(node)[0])
    if _shape(node) == _shape(source):
        return source
    return _view(node, source, _shape(node)) if source is not args_of(node)[0] else None


def _merge_cross_entropy(node: Node) -> Node | None:
    """The loss straight from the logits: the log-softmax of all classes is nowhere needed."""
    logp = args_of(node)[0]
    if not _is_over_classes(logp):
        return None
    with node.graph.inserting_before(node):
        args = (args_of(logp)[0], *args_of(node)[1:])
        merged = node.graph.call_function(torch.ops.torch_shard.cross_entropy.default, args)
    merged.meta = dict(node.meta)
    return merged


def _merge_cross_entropy_backward(node: Node) -> Node | None:
    """The gradient of logits straight from them, with no tensor of the gradient of their log-softmax."""
    grad, logp = args_of(node)[:2]
    if grad.target not in NLL_BACKWARD or args_of(grad)[1] is not logp or not _is_over_classes(logp):
        return None
    args = (args_of(grad)[0], args_of(logp)[0], *args_of(grad)[2:])
    return _call(node, torch.ops.torch_shard.cross_entropy_backward.default, args, _shape(node))


def _is_over_classes(node: Node) -> bool:
    """Whether `node` is the log-softmax over the dim of the classes, in the dtype of its logits."""
    rank = len(_shape(node))
    if node.target is not aten._log_softmax.default or not rank:
        return False
    logits, dim, _ = args_of(node)
    return dim % rank == min(1, rank - 1) and _dtype(node) == _dtype(logits)


def _swap_below_view(node: Node) -> Node | None:
    """Swapping the last two dims of a merged batch: swap first, merge then."""
    merged = args_of(node)[0]
    if not _swaps_last_two_of_three(node) or (source := _unmerged(merged)) is None:
        return None
    rank = len(_shape(source))
    shape = (*_shape(source)[:-2], *_shape(node)[-2:])
    swapped = _call(node, aten.transpose.int, (source, rank - 2, rank - 1), shape)
    return _view(node, swapped, _shape(node))


def _unmerge_bmm(node: Node) -> Node | None:
    """bmm(view(x), view(y)) with the same merged dims is one product with those dims kept apart."""
    left, right = (_unmerged(arg) for arg in args_of(node))
    if left is None or right is None or _shape(left)[:-2] != _shape(right)[:-2]:
        return None
    shape = (*_shape(left)[:-1], _shape(right)[-1])
    product = _call(node, aten.matmul.default, (left, right), shape)
    return _view(node, product, _shape(node))


def _unflatten_mm(node: Node) -> Node | None:
    """A linear layer on `view(x, [B * T, C])` is one on x; the gradient of its weight sums over B and T."""
    left, right = args_of(node)
    if (source := _unflattened(left)) is not None:
        shape = (*_shape(source)[:-1], _shape(right)[1])
        return _view(node, _call(node, aten.matmul.default, (source, right), shape), _shape(node))
    if left.target is not aten.t.default:
        return None
    grad, x = _unflattened(args_of(left)[0]), _unflattened(right)
    if grad is None or x is None or _shape(grad)[:-1] != _shape(x)[:-1]:
        return None
    dims = list(range(len(_shape(x)) - 1))
    return _call(node, aten.tensordot.default, (grad, x, dims, dims), _shape(node))


def _unflatten_addmm(node: Node) -> Node | None:
    bias, left, right = args_of(node)
    if node.kwargs or len(_shape(bias)) != 1 or (source := _unflattened(left)) is None:
        return None
    shape = (*_shape(source)[:-1], _shape(right)[1])
    return _view(node, _call(node, aten.addmm.default, (bias, source, right), shape), _shape(node))


def _unflatten_sum(node: Node) -> Node | None:
    """The gradient of a bias sums over B and T too."""
    merged, dims = args_of(node)[:2]
    if node.kwargs or list(dims or ()) != [0] or (source := _unflattened(merged)) is None:
        return None
    outer = list(range(len(_shape(source)) - 1))
    total = _call(node, aten.sum.dim_IntList, (source, outer), _shape(source)[-1:])
    return _view(node, total, _shape(node))


def _solve_for_determinant(node: Node) -> None:
    """The gradient of a determinant solves with the adjoint matrix, given its factors.

    PyTorch factors the transposed matrix where strides favour that, and then solves without the adjoint. JAX arrays
    have no strides, so our factors are always of the matrix itself.
    """
    factors = args_of(node)[0]
    factors = args_of(factors)[0] if factors.target is aten.add.Tensor else factors  # a singular one is shifted
    is_output = factors.target is operator.getitem
    if is_output and args_of(factors)[0].target in (aten._linalg_det.default, aten._linalg_slogdet.default):
        node.kwargs = {**node.kwargs, "adjoint": True}


_PRODUCTS: dict[Any, Callable[[Node], Node | None]] = {
    aten.nll_loss_forward.default: _merge_cross_entropy,
    aten.nll_loss2d_forward.default: _merge_cross_entropy,
    aten._log_softmax_backward_data.default: _merge_cross_entropy_backward,
    aten.bmm.default: _unmerge_bmm,
    aten.mm.default: _unflatten_mm,
    aten.addmm.default: _unflatten_addmm,
    aten.sum.dim_IntList: _unflatten_sum,
    aten.linalg_lu_solve.default: _solve_for_determinant,
}


def _unflattened(node: Node) -> Node | None:
    """The tensor of rank 3 or more that `node` is a view of with all but the last dim merged."""
    source = _source(node)
    shape, wide = _shape(node), _shape(source)
    return source if len(shape) == 2 and len(wide) > 2 and wide[-1] == shape[-1] else None


def _unmerged(node: Node) -> Node | None:
    """The tensor of rank 4 or more that `node` is a view of with all but the last two dims merged."""
    source = _source(node)
    shape, wide = _shape(node), _shape(source)
    return source if len(shape) == 3 and len(wide) > 3 and wide[-2:] == shape[-2:] else None


def _source(node: Node) -> Node:
    while node.op == "call_function" and node.target in VIEWS:
        node = args_of(node)[0]
    return node


def _swaps_last_two_of_three(node: Node) -> bool:
    if len(_shape(node)) != 3:
        return False
    if node.target is aten.permute.default:
        return [d % 3 for d in args_of(node)[1]] == [0, 2, 1]
    return node.target is aten.transpose.int and {d % 3 for d in args_of(node)[1:]} == {1, 2}


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def _view(at: Node, source: Node, shape: tuple[int, ...]) -> Node:
    return _call(at, aten.reshape.default, (source, list(shape)), shape)


def _call(at: Node, target: torch._ops.OpOverload, args: tuple, shape: tuple[int, ...]) -> Node:
    """A new node before `at`, with a fake value of that shape and the dtype of `at`."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(target, args)
    node.meta = {**at.meta, "val": at.meta["val"].new_empty(shape)}
    return node
