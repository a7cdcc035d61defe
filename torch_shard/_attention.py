"""Long causal attention as one operator: no weights are kept for the backward pass, none above the diagonal computed.

That saves time. XLA's CPU backend (jaxlib 0.10.2) runs blocks side by side, so temporary memory grows: by a fifth over
six layers of 1024 steps, by 40 % for a single layer of 512.

All other attention stays PyTorch's own mathematical form, in which XLA fuses the mask and the softmax.

Shapes: B batch, N heads, T queries, S keys, D width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F

from torch_shard._common.overrides import instead_of, is_plain

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
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
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
    """`scaled_dot_product_attention`, in our form where it pays."""
    if attn_mask is None and not dropout_p and is_causal and _fits(query, key, value, enable_gqa):
        return _Attention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)  # pyright: ignore
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> bool:
    """Whether our form means the same as PyTorch's."""
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
