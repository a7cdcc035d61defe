"""Attention that Hugging Face's models write out, as `scaled_dot_product_attention` has no soft caps and no sinks.

Gemma 2 bends all scores by `cap * tanh(scores / cap)`; gpt-oss gives each head a sink. Their functions are replaced
where their source is, to the letter, one that was read here, and where the mask is a known constant; the weights that
they return besides are computed as they say, and only where somebody uses them.
"""

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import torch
from torch.fx import Node

from torch_shard._capture import annotated, as_captured, autocast_only
from torch_shard._common.fx import RESHAPES, args_of, aten_name, call_before, new_before, shape_of, target_of
from torch_shard._common.overrides import captured_op, digest_of, instead_of_attribute, is_transformed, rewrites
from torch_shard._lowering.ops.attention import WHY, Form, as_autocast_has_it, attend, refusal
from torch_shard._lowering.ops.attention_masks import Seen, seen_through
from torch_shard._lowering.ops.context import gathered
from torch_shard._lowering.ops.registry import lowers

_KNOWN = {"587d5b52": "soft cap", "3cb759e1": "sinks"}
"""By the first digits of the SHA-256 of their source: that of Gemma 2 and ten models more, and that of gpt-oss."""

_NOT_CONSTANT = (
    "it is written out, with a soft cap or sinks, and its mask is no constant triangle or window, but depends on the "
    "batch. Without padding, and with padding on the right that the loss leaves out, leave attention_mask away"
)

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@instead_of_attribute("transformers.utils.generic.GeneralInterface", "get")
def interface_get(interface: Any, name: str, default: Any = None) -> Any:
    """HF's table of implementations; where the model's own function is taken, ours for those that are known."""
    found = Mapping.get(interface, name, default)
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if found is not default or not isinstance(interface, getattr(modeling, "AttentionInterface", ())):
        return found
    kind = _KNOWN.get(digest_of(getattr(found, "__code__", None)))
    return found if kind is None else functools.partial(_attend, found, kind)


def _attend(
    written: Attend,
    kind: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the function of this source returns: the output (B, T, N, D), and the weights."""
    q, k, v = map(as_autocast_has_it, (query, key, value))
    cap = settings.get("softcap") if kind == "soft cap" else None
    sinks = (torch.clone(module.sinks),) if kind == "sinks" else ()  # as precision has them
    with autocast_only():
        why = _why_not(module, (q, k, v), sinks, {**settings, "cap": cap})
        mask = None if attention_mask is None else as_captured(attention_mask)  # also where a layer is captured alone
        seen = None if why else _seen(mask, (q.shape[2], k.shape[2]))
        why = why or ("" if seen else _NOT_CONSTANT)
    with annotated(**{WHY: why}):
        out, weights = written(module, *gathered(query, key, value), attention_mask, **settings)
    if seen is None:
        return out, weights
    scale = settings.get("scaling")
    scale = module.head_dim**-0.5 if scale is None else scale
    with autocast_only():
        ours = attend(Form(seen, scale, cap=cap or 0.0), (q, k, v), sinks=sinks)
    return ours.transpose(1, 2).contiguous(), weights


def _why_not(
    module: Any, qkv: tuple[torch.Tensor, ...], sinks: tuple[torch.Tensor, ...], options: Mapping[str, Any]
) -> str:
    """Say why our form would not mean the same, or would not pay; empty if it does."""
    q, k, _ = qkv
    dropout, cap, scale = (options.get(name) for name in ("dropout", "cap", "scaling"))
    if dropout and module.training:
        return (
            f"it drops weights (dropout={dropout:g}) and is written out, with a soft cap or sinks. Set its "
            "attention_dropout to 0"
        )
    if why := refusal(*qkv, grouped=True):
        return why
    is_number = isinstance(scale, float | int | None) and (cap is None or (isinstance(cap, float | int) and cap > 0))
    is_sink = all(sink.shape == q.shape[1:2] and sink.is_floating_point() for sink in sinks)
    if is_number and is_sink and k.shape[1] * module.num_key_value_groups == q.shape[1] and not is_transformed(sinks):
        return ""
    return "its soft cap, its sinks or its heads are not as kernels take them"


def _seen(mask: torch.Tensor | None, size: tuple[int, int]) -> Seen | None:
    """What is seen through a mask that is added."""
    if mask is None:
        return Seen()
    return seen_through(mask, size) if mask.is_floating_point() else None


# Heads of keys and values that a model repeats for as many heads of queries: attention takes each of them once.
#
# Models of grouped queries repeat them where `scaled_dot_product_attention` has a mask (by `expand` and `reshape`, or
# `repeat_interleave`); a copy for each query is then read, kept for the backward pass and summed there.


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
