"""Long attention as one operator: no weights are kept for the backward pass, and none computed outside of a band.

That saves time where later keys are not seen. XLA's CPU backend (jaxlib 0.10.2) runs blocks side by side, so temporary
memory grows: by a fifth over six layers of 1024 steps, by 40 % for a single layer of 512. Attention to all keys takes
larger blocks, in about the time of PyTorch's own form.

All other attention stays PyTorch's own mathematical form, in which XLA fuses the mask and the softmax. Dropout drops
the weights that it would drop there: see `dropout`. A mask that is no band of keys is a bias: it is added to the scores
block by block, and has its gradient.

Scores may have a soft cap, `cap * tanh(scores / cap)`, 0 for none; and each head a sink, a number among the scores of
all queries that takes its part of the weights and has no value (`attention_written` is where models have these).

Shapes: B batch, N heads, T queries, S keys, D width of a head.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from torch_shard._capture import annotated, autocast_only
from torch_shard._common.autocast_policy import LOWER
from torch_shard._common.overrides import captured_op, gradients_again, instead_of, is_plain, is_transformed
from torch_shard._lowering.ops.attention_blocks import LONG, in_blocks, in_blocks_backward
from torch_shard._lowering.ops.attention_context import on_mesh
from torch_shard._lowering.ops.attention_masks import Seen, seen_through
from torch_shard._lowering.ops.context import current_context, gathered
from torch_shard._lowering.ops.dropout import MOST_DRAWN, KeptWeights
from torch_shard._lowering.ops.registry import lowers

SHORTEST, SHORTEST_NARROW = LONG, 128
"""Queries from which on it pays: in float32, where it saves time for memory (benchmarks/ops.py), and in half precision.

PyTorch's own form computes in float32 inside, and TPUs multiply that in several passes: for ViT's 197 queries, this one
takes 16 % less of a layer's cycles under TPU's compiler, and splash attention, padded, 6 to 18 % more."""

WHY = "attention"
"""Under this name the notes of nodes say why attention keeps PyTorch's own form."""


@captured_op(
    "torch_shard::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor[] segments, float scale, SymInt[] band, Tensor[] seed, float "
    "dropout, float cap, Tensor[] sinks, Tensor[] bias) -> (Tensor, Tensor)",
)
def _attention_shapes(q, k, v, *_):
    of_total = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=of_total)


@captured_op(
    "torch_shard::attention_backward",
    "(Tensor grad, Tensor[] saved, Tensor[] segments, float scale, SymInt[] band, Tensor[] seed, float "
    "dropout, float cap, Tensor[] sinks, Tensor[] bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_shapes(grad, saved, *about):
    q, k, v = map(torch.empty_like, saved[:3])
    of_sinks, of_bias = (x[0] if x and x[0].is_floating_point() else q.new_empty(0) for x in about[-2:])
    return q, k, v, torch.empty_like(of_sinks), torch.empty_like(of_bias)


@dataclasses.dataclass(frozen=True)
class Form:
    """How weights are made of scores.

    Attributes:
        seen: Which keys a query sees.
        scale: Of the scores.
        dropout: The share of weights that is dropped.
        cap: Soft cap of the scores, 0 for none.
    """

    seen: Seen
    scale: float
    dropout: float = 0.0
    cap: float = 0.0


def attend(
    form: Form,
    qkv: Sequence[torch.Tensor],
    *,
    sinks: Sequence[torch.Tensor] = (),
    bias: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Attention in our form, (B, N, T, D)."""
    seed = (torch.ops.torch_shard.seed(),) if form.dropout else ()
    counts = 3, len(seed), len(sinks), len(bias)
    out: Any = _Attention.apply(form, counts, *qkv, *seed, *sinks, *bias)
    return out


def _parts(tensors: Iterable[torch.Tensor], counts: Iterable[int]) -> Iterator[list[torch.Tensor]]:
    given = iter(tensors)
    return ([next(given) for _ in range(count)] for count in counts)


class _Attention(torch.autograd.Function):
    """`(Form, counts, q, k, v, *seed, *sinks, *bias) -> out`: so many tensors of each kind."""

    @staticmethod
    def forward(ctx: Any, form: Form, counts: tuple[int, ...], *tensors: torch.Tensor) -> torch.Tensor:
        qkv, seed, sinks, bias = _parts(tensors, counts)
        segments = [numbers.expand(len(qkv[0]), -1) for numbers in form.seen.segments]
        band = [-1 if size is None else size for size in (form.seen.before, form.seen.after)]
        about = (segments, form.scale, band, seed, form.dropout, form.cap, sinks, bias)
        out, log_total = torch.ops.torch_shard.attention(*qkv, *about)
        ctx.band, ctx.numbers, ctx.counts = band, (form.scale, form.dropout, form.cap), (*counts, 2, len(segments))
        ctx.save_for_backward(*tensors, out, log_total, *segments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        qkv, seed, sinks, bias, results, segments = _parts(ctx.saved_tensors, ctx.counts)
        form, none = Form(Seen(*limits(ctx.band), tuple(segments)), *ctx.numbers), [None] * len(seed)
        if not torch.is_grad_enabled():
            about = (segments, form.scale, ctx.band, seed, form.dropout, form.cap, sinks, bias)
            *found, of_sinks, of_bias = torch.ops.torch_shard.attention_backward(grads[0], [*qkv, *results], *about)
            of_biases = [of_bias if x.is_floating_point() else None for x in bias]
            return None, None, *found, *none, *([of_sinks] * len(sinks)), *of_biases
        of_qkv, _, of_sinks, of_bias = _parts(ctx.needs_input_grad[2:], ctx.counts[:4])
        out, needed = _written_out(form, qkv, seed, sinks, bias), (*of_qkv, *of_sinks, *of_bias)
        found = gradients_again(out, (*qkv, *sinks, *bias), needed, grads[:1])
        return None, None, *found[:3], *none, *found[3:]


def _written_out(
    form: Form,
    qkv: list[torch.Tensor],
    seed: list[torch.Tensor],
    sinks: list[torch.Tensor],
    bias: list[torch.Tensor],
) -> torch.Tensor:
    """The same in operators that PyTorch has derivatives of."""
    q, k, v = qkv
    mask = bias[0] if bias else form.seen.mask(q.shape[2], k.shape[2])
    if not seed and not sinks and not form.cap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=form.scale, enable_gqa=q.shape[1] != k.shape[1])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * form.scale
    scores = form.cap * torch.tanh(scores / form.cap) if form.cap else scores
    is_seen = mask if mask.dtype is torch.bool else mask != -torch.inf
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    more = [sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1) for sink in sinks]
    weights = torch.cat([scores, *more], -1).softmax(-1)[..., : scores.shape[-1]]
    weights = torch.where(is_seen.any(-1, keepdim=True), weights, 0)
    if seed:
        kept = torch.ops.torch_shard.kept(seed[0], weights.shape, form.dropout)
        weights = weights * kept / (1 - form.dropout)
    return weights @ v


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
    q, k, v = map(as_autocast_has_it, (query, key, value))
    with autocast_only():
        why = _undroppable(dropout_p, q.shape[:-1].numel() * k.shape[-2]) or refusal(q, k, v, grouped=enable_gqa)
        seen = None if why else _seen(attn_mask, is_causal, (q.shape[-2], k.shape[-2]))
        bias = () if why or seen is not None or is_causal else _bias(attn_mask, q, k)
        why = why or ("" if seen else unknown(attn_mask))
        if seen is not None or bias:
            form = Form(seen or Seen(), query.shape[-1] ** -0.5 if scale is None else scale, dropout_p)
            with annotated(**{WHY: why}):
                return attend(form, (q, k, v), bias=bias)
    q, k, v = gathered(q, k, v)
    with annotated(**{WHY: why}):
        mask = attn_mask if attn_mask is None else as_autocast_has_it(attn_mask)
        return _in_full(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _in_full(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *args: Any,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """PyTorch's own formula, in which queries alone are scaled, and not keys too: those of a cache are many."""
    kwargs: dict[str, Any] = {"enable_gqa": enable_gqa}
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point() or not q.shape[-1]:
        return F.scaled_dot_product_attention(q, k, v, mask, *args, scale=scale, **kwargs)
    wide = torch.float32 if q.dtype in LOWER else q.dtype  # as PyTorch computes it
    mask = mask.to(wide) if mask is not None and mask.dtype == q.dtype else mask
    with autocast_only():
        q_scaled = q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out = F.scaled_dot_product_attention(q_scaled, k.to(wide), v.to(wide), mask, *args, scale=1.0, **kwargs)
        return out.to(q.dtype)


def _seen(mask: torch.Tensor | None, is_causal: bool, size: tuple[int, int]) -> Seen | None:
    if mask is None:
        return Seen(after=0) if is_causal else Seen()
    return None if is_causal else seen_through(mask, size)


def _bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A mask of no known form as what is added to scores, of four dims; none where that is not to be, or PyTorch's."""
    if mask is None or current_context() is not None or mask.ndim > 4 or is_transformed([mask]):
        return ()
    mask = as_autocast_has_it(mask)[(None,) * (4 - mask.ndim)]
    size = *q.shape[:3], k.shape[2]
    is_taken = mask.dtype in (torch.bool, torch.float32, q.dtype)
    return (mask,) if is_taken and all(own in (1, of) for own, of in zip(mask.shape, size, strict=True)) else ()


def unknown(mask: torch.Tensor | None) -> str:
    """Say of which kind a mask is that is not known."""
    if mask is None:
        return ""
    if mask.requires_grad:
        return "its mask is trained (a bias of positions), and kernels give no gradient of it"
    if mask.is_floating_point():
        return (
            f"its mask adds numbers to the scores ({mask.dtype}; the biases of T5 and ALiBi), which kernels do not "
            "take. One that only hides keys should be of bool, or a constant of 0 and -inf"
        )
    return (
        f"its mask {tuple(mask.shape)} is of no known form: key padding (B, 1, 1, S), a triangle or a window made of "
        "torch.arange or tril, documents (numbers of queries == those of keys), or such joined by &"
    )


def as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    is_cast = torch.is_autocast_enabled("cpu") and tensor.dtype in (torch.float32, *LOWER)
    return tensor.to(torch.get_autocast_dtype("cpu")) if is_cast else tensor


def _undroppable(dropout_p: float, num_weights: int) -> str:
    """Say why weights cannot be dropped in blocks; empty if they can."""
    if dropout_p and (num_weights >= MOST_DRAWN or not 0 < dropout_p < 1):
        return f"it drops of {num_weights} weights (dropout_p={dropout_p:g}), blocks of fewer than {MOST_DRAWN}"
    return ""


def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grouped: bool) -> str:
    """Say why our form would not mean the same as PyTorch's, or would not pay; empty if it does."""
    shapes, context = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}", current_context()
    if context is not None and min(q.ndim, k.ndim) > 2:
        context.check_heads(q.shape[-3], k.shape[-3])
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"queries, keys and values are {shapes}, and not (batch, heads, length, width) all three"
    shortest = SHORTEST_NARROW if q.dtype in LOWER else SHORTEST
    if (q.shape[2] < shortest and context is None) or not k.shape[2]:
        return f"it is shorter than {shortest} queries"
    is_alike = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
    if not is_alike or (q.shape[1] % k.shape[1] if grouped else q.shape[1] != k.shape[1]):
        return f"queries, keys and values are {shapes}, which do not fit without being broadcast: expand them"
    if is_transformed([q, k, v]):
        return "it is under a transform of torch.func"
    return "" if is_plain([q, k, v]) else f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}"


@lowers(torch.ops.torch_shard.attention.default, on_mesh=True)
def lowered(q, k, v, segments, scale, band, seed, dropout, cap, sinks, bias, *, split=None):
    """Returns the output, and the logarithm of each row's total weight where the backward pass needs it."""
    segments, about = tuple(segments), {"scale": scale, "band": limits(band), "cap": cap}
    parts = None if bias else on_mesh((q, k, v), segments, sinks, about, dropout, split)
    if parts is not None:
        return parts.forward(q, k, v, segments, sinks, seed)
    kept = KeptWeights(q, k, seed[0], dropout) if dropout else None
    return in_blocks(q, k, v, segments, **about, kept=kept, sinks=sinks, bias=bias)


@lowers(torch.ops.torch_shard.attention_backward.default, on_mesh=True)
def lowered_backward(grad, saved, segments, scale, band, seed, dropout, cap, sinks, bias, *, split=None):
    """Gradients of what `lowered` gave, which is among what was saved."""
    qkv, segments, about = saved[:3], tuple(segments), {"scale": scale, "band": limits(band), "cap": cap}
    none = jnp.zeros(0, qkv[0].dtype)
    parts = None if bias else on_mesh(qkv, segments, sinks, about, dropout, split)
    if parts is not None:
        found = parts.backward(grad, saved, segments, sinks, seed)
    else:
        again = jax.lax.optimization_barrier((grad, *seed))[1:]  # nothing drawn is held until then
        kept = KeptWeights(qkv[0], qkv[1], again[0], dropout) if dropout else None
        found = in_blocks_backward(grad, saved, segments, **about, kept=kept, sinks=sinks, bias=bias)
    of_qkv, others = found[:3], found[3:]
    return *of_qkv, *(others[: len(sinks)] or (none,)), *(others[len(sinks) :] or (none,))


def limits(band: Sequence[int]) -> tuple[int | None, int | None]:
    """How many keys before its place and after it a query sees, None for all; an operator has -1 for these."""
    before, after = (None if size < 0 else size for size in band)
    return before, after
