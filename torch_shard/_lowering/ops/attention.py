"""Long causal attention as one operator: no weights are kept for the backward pass, none above the diagonal computed.

That saves time. XLA's CPU backend (jaxlib 0.10.2) runs blocks side by side, so temporary memory grows: by a fifth over
six layers of 1024 steps, by 40 % for a single layer of 512.

All other attention stays PyTorch's own mathematical form, in which XLA fuses the mask and the softmax.

Shapes: B batch, N heads, T queries, S keys, D width of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from torch_shard._capture import autocast_only, is_causal_mask
from torch_shard._common.autocast_policy import LOWER
from torch_shard._common.overrides import instead_of, is_plain
from torch_shard._lowering.ops.registry import lowers

SHORTEST = 512
"""Queries from which on the time that it saves is worth the memory (benchmarks/ops.py)."""


@torch.library.custom_op("torch_shard::causal_attention", mutates_args=())
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_attention.register_fake
def _attention_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("torch_shard::causal_attention_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_total: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_backward.register_fake
def _backward_shapes(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_total: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Attention(torch.autograd.Function):
    """`(q_BNTD, k_BNSD, v_BNSD, scale) -> out_BNTD`; k and v may have fewer heads."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out, log_total = torch.ops.torch_shard.causal_attention(q, k, v, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, log_total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        if not torch.is_grad_enabled():
            return *torch.ops.torch_shard.causal_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None
        q, k, v = ctx.saved_tensors[:3]  # for a derivative of this derivative
        options = {"is_causal": True, "scale": ctx.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        needed = ctx.needs_input_grad[:3]
        wanted = [t for t, need in zip((q, k, v), needed, strict=True) if need]
        out = F.scaled_dot_product_attention(q, k, v, **options)
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return *(next(found) if need else None for need in needed), None


@instead_of(F.scaled_dot_product_attention)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention`, in our form where it pays; autocast runs it in the lower precision."""
    q, k, v = map(_as_autocast_has_it, (query, key, value))
    with autocast_only():
        if not dropout_p and _fits(q, k, v, enable_gqa) and _is_causal(attn_mask, is_causal):
            return _Attention.apply(q, k, v, query.shape[-1] ** -0.5 if scale is None else scale)  # pyright: ignore
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_causal(mask: torch.Tensor | None, is_causal: bool) -> bool:
    return is_causal if mask is None else not is_causal and is_causal_mask(mask)


def _as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    is_cast = torch.is_autocast_enabled("cpu") and tensor.dtype in (torch.float32, *LOWER)
    return tensor.to(torch.get_autocast_dtype("cpu")) if is_cast else tensor


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> bool:
    """Tell whether our form means the same as PyTorch's."""
    return (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[2] >= SHORTEST
        and k.shape[2] > 0
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1:3] == v.shape[1:3]
        and (q.shape[1] % k.shape[1] == 0 if grouped else q.shape[1] == k.shape[1])
        and q.shape[3] == k.shape[3]
        and is_plain([q, k, v])
    )


BLOCK, MOST_BLOCKS = 128, 16


def _blocks(num_queries, num_keys):
    """Start and end of each block's queries, and how many keys its last query sees."""
    size = max(BLOCK, -(-num_queries // MOST_BLOCKS))
    ends = [min(start + size, num_queries) for start in range(0, num_queries, size)]
    return [(start, end, min(end, num_keys)) for start, end in zip([0, *ends], ends, strict=False)]


def _by_key_head(x, num_heads):
    return x.reshape(len(x), num_heads, -1, *x.shape[2:])


def _scores(q, k, start, seen, scale):
    """Scores of a block in float32, -inf above the diagonal."""
    scores = scale * jnp.einsum("bkgtd,bksd->bkgts", q, k[:, :, :seen], preferred_element_type=jnp.float32)
    row = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    return jnp.where(row >= jax.lax.broadcasted_iota(jnp.int32, scores.shape, 4), scores, -jnp.inf)


@lowers(torch.ops.torch_shard.causal_attention.default)
def causal_attention(q, k, v, scale):
    """Returns the output and the logarithm of each row's total weight."""
    grouped = _by_key_head(q, k.shape[1])
    outs, totals = [], []
    for start, end, seen in _blocks(q.shape[2], k.shape[2]):
        scores = _scores(grouped[..., start:end, :], k, start, seen, scale)
        highest = jnp.max(scores, -1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, -1, keepdims=True)
        out = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v[:, :, :seen])
        outs.append(out / total.astype(v.dtype))
        totals.append((highest + jnp.log(total))[..., 0])
    out = jnp.concatenate(outs, 3).reshape(*q.shape[:-1], v.shape[-1])
    return out, jnp.concatenate(totals, 3).reshape(q.shape[:-1])


@lowers(torch.ops.torch_shard.causal_attention_backward.default)
def causal_attention_backward(grad, q, k, v, out, log_total, scale):
    """Weights are computed again from their logarithmic totals; the barrier keeps XLA from doing so before `grad`."""
    shape, tensors = q.shape, (grad, q, k, v, out, log_total)
    grad, q, k, v, out, log_total = jax.lax.optimization_barrier(tensors)
    q, grad, out, log_total = (_by_key_head(x, k.shape[1]) for x in (q, grad, out, log_total))
    along = jnp.sum((grad * out).astype(jnp.float32), -1, keepdims=True)
    grad_qs, grad_k, grad_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for start, end, seen in _blocks(shape[2], k.shape[2]):
        rows = (..., slice(start, end), slice(None))
        weights = jnp.exp(_scores(q[rows], k, start, seen, scale) - log_total[..., start:end, None])
        grad_weights = jnp.einsum("bkgtd,bksd->bkgts", grad[rows], v[:, :, :seen], preferred_element_type=jnp.float32)
        grad_scores = (scale * weights * (grad_weights - along[rows])).astype(q.dtype)
        grad_qs.append(jnp.einsum("bkgts,bksd->bkgtd", grad_scores, k[:, :, :seen]))
        grad_k = grad_k.at[:, :, :seen].add(jnp.einsum("bkgts,bkgtd->bksd", grad_scores, q[rows]))
        grad_v = grad_v.at[:, :, :seen].add(jnp.einsum("bkgts,bkgtd->bksd", weights.astype(v.dtype), grad[rows]))
    return jnp.concatenate(grad_qs, 3).reshape(shape), grad_k, grad_v
