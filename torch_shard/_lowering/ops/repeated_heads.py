"""Heads of keys and values that a model repeats for as many heads of queries: attention takes each of them once.

Models of grouped queries repeat them where `scaled_dot_product_attention` has a mask (by `expand` and `reshape`, or
`repeat_interleave`); a copy for each query is then read, kept for the backward pass and summed there.
"""

import operator

import jax.numpy as jnp
import torch
from torch.fx import Node

from torch_shard._common.fx import args_of, aten_name, call_before, new_before, shape_of, target_of
from torch_shard._common.operator_families import RESHAPES
from torch_shard._common.overrides import captured_op, rewrites
from torch_shard._lowering.ops.registry import lowers

aten, ours = torch.ops.aten, torch.ops.torch_shard


@captured_op("torch_shard::first_of_each", "(Tensor x, SymInt times) -> Tensor")
def _more(x, times):
    return x.new_empty(x.shape[0], x.shape[1] * times, *x.shape[2:])


@lowers(ours.first_of_each.default)
def first_of_each(x, times):
    """So many heads for each of `x`, (B, K, S, D) to (B, K * times, S, D): itself, and zeros."""
    return jnp.zeros((len(x), x.shape[1] * times, *x.shape[2:]), x.dtype).at[:, ::times].set(x)


@rewrites(ours.attention.default)
def take_each_once(node: Node) -> Node | None:
    """Attention of the heads as they were before they were repeated."""
    q, k, v, *rest = args_of(node)
    once = [_once(k, node), _once(v, node)]
    if None in once:
        return None
    return new_before(node, target_of(node), (q, *once, *rest), node.meta["val"])


@rewrites(ours.attention_backward.default)
def give_each_once(node: Node) -> None:
    """Its gradients: of the heads that were repeated, all of it to the first."""
    grad, (q, k, v, *results), *rest = args_of(node)
    once = [_once(k, node), _once(v, node)]
    if None in once:
        return
    values = (node.meta["val"][0], *(x.meta["val"] for x in once if x is not None), *node.meta["val"][3:])
    found = new_before(node, target_of(node), (grad, [q, *once, *results], *rest), values)
    for user in list(node.users):
        index = args_of(user)[1]
        part = new_before(user, operator.getitem, (found, index), values[index])  # pyright: ignore[reportArgumentType]
        if index in (1, 2):
            times = shape_of(user)[1] // shape_of(part)[1]
            part = call_before(user, ours.first_of_each.default, (part, times), shape_of(user))
        user.replace_all_uses_with(part)


def _once(heads: Node, at: Node) -> Node | None:
    """The heads as they were, before a node `at`; those of (B, K, 1, S, D) expanded, merged and perhaps rounded."""
    node, casts = _before_casts(heads)
    if aten_name(node) != "expand" or len(shape_of(node)) != 5:
        return None
    (batch, num, times, *rest), source = shape_of(node), args_of(node)[0]
    if shape_of(heads) != (batch, num * times, *rest) or shape_of(source) != (batch, num, 1, *rest):
        return None
    found = new_before(at, aten.squeeze.dims, (source, [2]), source.meta["val"].squeeze(2))
    return _cast(found, casts, at)


def _before_casts(node: Node) -> tuple[Node, list[Node]]:
    """What a node only rounds and reshapes, and the casts on the way, last first."""
    casts = []
    while node.op == "call_function" and (node.target in RESHAPES or node.target is aten._to_copy.default):
        casts += [node] if node.target is aten._to_copy.default else []
        node = args_of(node)[0]
    return node, casts


def _cast(found: Node, casts: list[Node], at: Node) -> Node:
    for cast in reversed(casts):
        found = new_before(at, aten._to_copy.default, (found,), found.meta["val"].to(cast.meta["val"].dtype))
        found.kwargs = cast.kwargs
    return found


@rewrites(aten.sum.dim_IntList)
def sum_of_one(node: Node) -> Node | None:
    """The gradient of the expansion: all but one of those that are summed are zeros."""
    parts, dims, *keepdim = args_of(node)
    source, casts = _before_casts(parts)
    if source.target is not ours.first_of_each.default or node.kwargs:
        return None
    grad, times = args_of(source)
    batch, num, *rest = shape_of(grad)
    if shape_of(parts) != (batch, num, times, *rest) or list(dims) != [2]:
        return None
    grad = _cast(grad, casts, node)
    return call_before(node, aten.unsqueeze.default, (grad, 2), shape_of(node)) if any(keepdim) else grad
