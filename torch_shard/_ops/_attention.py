"""Long causal attention by blocks of queries, each with the keys up to its diagonal.

Shapes: B batch, K heads of keys, G heads of queries for each, T queries, S keys, D width of a head.
"""

import jax
import jax.numpy as jnp
import torch

from torch_shard import _attention  # noqa: F401  (defines the operators)
from torch_shard._ops._registry import lowers

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
