"""Attention in blocks of queries, in plain JAX: the form for all devices, where no kernel is to be had.

A band is how many keys before its own place and after it a query sees; None for all. A cap is a soft cap of the scores,
0 for none; sinks are none, or one array with a number for each head, which is among the scores of each of its queries.
A bias is none, or one array that is added to the scores (or, of booleans, hides keys), each dim its size or 1. A start
is the places of the first query and the first key, where they are a part of all; they may be traced.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys, D width of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp

from torch_shard._common.dtypes import dtype_of_sums, widened

LONG = 512
"""Queries from which on attention that leaves keys out is cut into blocks, or has a kernel."""

# By cycles under TPU's compiler (v5e, 512 and 1024 queries), and time on a CPU.
BLOCK = 128
"""Fewest queries of a block where it leaves keys out or drops weights."""
BIASED_BLOCK = 256
"""Fewest where it has a bias."""
WIDE_BLOCK = 1024
"""Fewest where it sees all keys."""
MOST_BLOCKS = 16
"""The largest number of blocks, each of which takes the compiler's time."""


def _blocks(shape, band, start, *, drops, is_biased):
    """Start and end of the queries of each block, and of the keys that they see; for weights (..., T, S)."""
    num_queries, num_keys = shape
    before, after = band
    if start is not None:
        # Which keys are seen is known only where it runs.
        before = after = None

    fewest = BLOCK
    leaves_keys_out = before is not None or after is not None
    if not leaves_keys_out or num_queries < LONG:
        if not drops:
            fewest = BIASED_BLOCK if is_biased else WIDE_BLOCK
        # A single block and a rest are no gain.
        if num_queries < 2 * fewest:
            fewest = WIDE_BLOCK
    size = max(fewest, math.ceil(num_queries / MOST_BLOCKS))

    for begin in range(0, num_queries, size):
        end = min(begin + size, num_queries)
        first = 0 if before is None else max(begin - before, 0)
        last = num_keys if after is None else min(end + after, num_keys)
        yield slice(begin, end), slice(min(first, num_keys - 1), last)


def _by_key_head(x, num_heads):
    return x.reshape(len(x), num_heads, -1, *x.shape[2:])


def _scores(q, k, segments, block, *, scale, band, cap, start, bias):
    """Scores of a block, wide, -inf where a query does not see a key; and the derivative by their soft cap."""
    queries, keys = block
    wide = dtype_of_sums(q.dtype)
    scores = jnp.einsum("bkgtd,bksd->bkgts", q[..., queries, :], k[:, :, keys], preferred_element_type=wide)
    seen = _seen(scores.shape, segments, block, band=band, start=start)

    scores = scale * scores
    slope = 1
    if cap:
        bent = jnp.tanh(scores / cap)
        scores = cap * bent
        slope = 1 - bent * bent

    for whole_bias in bias:
        part = whole_bias[_within(whole_bias, block)]
        if part.dtype == bool:
            scores = jnp.where(part, scores, -jnp.inf)
        else:
            scores = scores + part.astype(scores.dtype)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores, slope


def _grouped(bias, num_heads):
    """A bias (B, N, T, S) as scores have it, (B, K, N / K, T, S); each size may be 1."""
    return [_by_key_head(x, num_heads if x.shape[1] > 1 else 1) for x in bias]


def _within(x, block):
    """Where the part of a bias lies that a block needs."""
    index: list[object] = [...]
    for part, size in zip(block, x.shape[-2:], strict=True):
        index.append(part if size > 1 else slice(None))
    return tuple(index)


def _sink(sinks, num_heads):
    """The sinks as scores of a block, (1, K, N / K, 1, 1)."""
    return widened(sinks[0]).reshape(1, num_heads, -1, 1, 1)


def _seen(shape, segments, block, *, band, start):
    """Which keys the queries of a block see, broadcast to scores of this shape; None for all."""
    queries, keys = block
    before, after = band
    first_query, first_key = start or (0, 0)
    row = first_query + queries.start + jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    column = first_key + keys.start + jax.lax.broadcasted_iota(jnp.int32, shape, 4)

    conditions = []
    if after is not None:
        conditions.append(column - row <= after)
    if before is not None:
        conditions.append(row - column <= before)
    if segments:
        of_queries, of_keys = segments
        is_same = of_queries[:, queries, None] == of_keys[:, None, keys]
        conditions.append(is_same[:, None, None])
    if not conditions:
        return None
    return functools.reduce(jnp.logical_and, conditions)


def in_blocks(q, k, v, segments, *, scale, band, cap=0, kept=None, sinks=(), bias=(), start=None, dtype=None):
    """Returns the output and the logarithm of each row's total weight; a query that sees no key gets zeros.

    `kept`, of class `KeptWeights`, says where dropout drops weights. The output is of `dtype`, by default that of the
    values.
    """
    dtype = dtype or v.dtype
    num_heads, num_keys = k.shape[1:3]
    grouped = _by_key_head(q, num_heads)
    bias = _grouped(bias, num_heads)
    about = {"scale": scale, "band": band, "cap": cap, "start": start, "bias": bias}

    outs = []
    totals = []
    for (queries, keys), factors in _with_factors((q.shape[2], num_keys), band, start, kept, bias):
        scores, _ = _scores(grouped, k, segments, (queries, keys), **about)

        # The smallest number in place of -inf, so that a query that sees no key has weights of 0, and not of NaN.
        highest = jnp.max(scores, -1, keepdims=True, initial=jnp.finfo(scores.dtype).min)
        if sinks:
            highest = jnp.maximum(highest, _sink(sinks, num_heads))
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, -1, keepdims=True)
        if sinks:
            total = total + jnp.exp(_sink(sinks, num_heads) - highest)
        total = jnp.where(total == 0, 1, total)

        # Dropout is of weights that are divided by the total of all.
        if factors is not None:
            weights = weights * factors
        out = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v[:, :, keys], preferred_element_type=dtype)
        outs.append(out / total.astype(dtype))
        totals.append((highest + jnp.log(total))[..., 0])

    out = jnp.concatenate(outs, 3).reshape(*q.shape[:-1], v.shape[-1])
    return out, jnp.concatenate(totals, 3).reshape(q.shape[:-1])


def _with_factors(shape, band, start, kept, bias):
    """Each block of weights (..., T, S), and the factors of its weights, None without dropout."""
    blocks = list(_blocks(shape, band, start, drops=kept is not None, is_biased=bool(bias)))
    factors = [None] * len(blocks) if kept is None else kept.factors(blocks)
    return zip(blocks, factors, strict=True)


def in_blocks_backward(
    grad, saved, segments, *, scale, band, cap=0, kept=None, sinks=(), bias=(), start=None, dtype=None
):
    """Gradients of q, k, v, the sinks and a bias of numbers, of `saved = (q, k, v, out, log_total)`.

    Weights are computed again from their logarithmic totals; the barrier keeps XLA from doing so before `grad`. That of
    q is of `dtype`, by default its own, those of k and v are float32 at least.
    """
    shape = saved[0].shape
    wide = dtype_of_sums(saved[0].dtype)
    grad, q, k, v, out, log_total = jax.lax.optimization_barrier((grad, *saved))
    num_heads, num_keys = k.shape[1:3]
    q, grad, out, log_total = (_by_key_head(x, num_heads) for x in (q, grad, out, log_total))

    # What all weights of a query lose if one grows, as their sum stays 1 (Dao et al., 2022, appendix B.2).
    along = jnp.sum(widened(grad * out), -1, keepdims=True)
    grouped_bias = _grouped(bias, num_heads)
    about = {"scale": scale, "band": band, "cap": cap, "start": start, "bias": grouped_bias}

    grad_qs = []
    grad_k = jnp.zeros(k.shape, wide)
    grad_v = jnp.zeros(v.shape, wide)
    grads_bias = [jnp.zeros(x.shape, wide) for x in grouped_bias if x.dtype != bool]
    for (queries, keys), factors in _with_factors((shape[2], num_keys), band, start, kept, bias):
        rows = (..., queries, slice(None))
        scores, slope = _scores(q, k, segments, (queries, keys), **about)
        weights = jnp.exp(scores - log_total[..., queries, None])
        grad_weights = jnp.einsum("bkgtd,bksd->bkgts", grad[rows], v[:, :, keys], preferred_element_type=wide)
        if factors is None:
            factors = 1
        grad_biased = weights * (factors * grad_weights - along[rows])
        for number, total in enumerate(grads_bias):
            grads_bias[number] = total.at[_within(total, (queries, keys))].add(_summed(grad_biased, total))

        grad_scores = (scale * slope * grad_biased).astype(q.dtype)
        grad_q = jnp.einsum("bkgts,bksd->bkgtd", grad_scores, k[:, :, keys], preferred_element_type=dtype or q.dtype)
        grad_qs.append(grad_q)
        grad_k = grad_k.at[:, :, keys].add(jnp.einsum("bkgts,bkgtd->bksd", grad_scores, q[rows]))
        dropped = (weights * factors).astype(v.dtype)
        grad_v = grad_v.at[:, :, keys].add(jnp.einsum("bkgts,bkgtd->bksd", dropped, grad[rows]))

    grad_q = jnp.concatenate(grad_qs, 3).reshape(shape)
    grads_sinks = [_gradient_of_sinks(sink, along, log_total, num_heads) for sink in sinks]
    # A bias of booleans has no gradient.
    grads_bias = [grad.reshape(x.shape).astype(x.dtype) for grad, x in zip(grads_bias, bias, strict=False)]
    return grad_q, grad_k, grad_v, *grads_sinks, *grads_bias


def _summed(grad, bias):
    """A gradient of scores, summed along the dims along which a bias is one and the same."""
    return jnp.sum(grad, [dim for dim, size in enumerate(bias.shape) if size == 1], keepdims=True)


def _gradient_of_sinks(sink, along, log_total, num_heads):
    """A sink takes from the weights, and with them from what they bring along, by its own weight."""
    taken = -jnp.exp(_sink([sink], num_heads)[..., 0] - log_total) * along[..., 0]
    return taken.sum((0, 3)).reshape(sink.shape).astype(sink.dtype)
