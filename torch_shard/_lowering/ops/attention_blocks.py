"""Attention in blocks of queries, in plain JAX: the form for all devices, where no kernel is to be had.

A band is how many keys before its own place and after it a query sees; None for all. A cap is a soft cap of the scores,
0 for none; sinks are none, or one array with a number for each head, which is among the scores of each of its queries.
A bias is none, or one array that is added to the scores (or, of booleans, hides keys), each dim its size or 1. A start
is the places of the first query and the first key, where they are a part of all; they may be traced.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys, D width of a head.
"""

import functools

import jax
import jax.numpy as jnp

from torch_shard._common.axes import vary_like
from torch_shard._lowering.ops.dropout import PIECES

LONG = 512
"""Queries from which on attention that leaves keys out is cut into blocks, or has a kernel."""

BLOCK, BIASED_BLOCK, WIDE_BLOCK, MOST_BLOCKS = 128, 256, 1024, 16
"""Fewest queries of a block where it leaves keys out or drops weights, where it has a bias, and where it sees all; and
the largest number of blocks. By cycles under TPU's compiler (v5e, 512 and 1024 queries), and time on a CPU."""


def _blocks(shape, band, start, *, drops, is_biased):
    """Start and end of the queries of each block, and of the keys that they see; for weights (..., T, S)."""
    (num_queries, num_keys), (before, after) = shape, band
    if start is not None:
        before = after = None  # which keys are seen is known only where it runs
    fewest = BLOCK
    if before is after is None or num_queries < LONG:
        fewest = BLOCK if drops else BIASED_BLOCK if is_biased else WIDE_BLOCK
        fewest = fewest if num_queries >= 2 * fewest else WIDE_BLOCK
    size = max(fewest, -(-num_queries // MOST_BLOCKS))
    for begin in range(0, num_queries, size):
        end = min(begin + size, num_queries)
        first = 0 if before is None else max(begin - before, 0)
        last = num_keys if after is None else min(end + after, num_keys)
        yield slice(begin, end), slice(min(first, num_keys - 1), last)


def _by_key_head(x, num_heads):
    return x.reshape(len(x), num_heads, -1, *x.shape[2:])


def wide(dtype):
    """In which scores and sums are computed."""
    return jnp.promote_types(dtype, jnp.float32)


def _scores(q, k, segments, block, *, scale, band, cap, start, bias):
    """Scores of a block, wide, -inf where a query does not see a key; and the derivative by their soft cap."""
    begin, size, keys = block
    scores = jnp.einsum("bkgtd,bksd->bkgts", _cut(q, begin, size), k[:, :, keys], preferred_element_type=wide(q.dtype))
    seen = _seen(scores.shape, segments, block, band=band, start=start)
    scores, slope = scale * scores, 1
    if cap:
        bent = jnp.tanh(scores / cap)
        scores, slope = cap * bent, 1 - bent * bent
    for x in bias:
        part = x if x.shape[3] == 1 else _cut(x, begin, size)
        part = part if x.shape[4] == 1 else part[..., keys]
        scores = jnp.where(part, scores, -jnp.inf) if part.dtype == bool else scores + part.astype(scores.dtype)
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf), slope


def _cut(x, begin, size, dim=3):
    """The rows of a block of queries, which begins at a number that may be traced."""
    return jax.lax.dynamic_slice_in_dim(x, begin, size, dim)


def _grouped(bias, num_heads):
    """A bias (B, N, T, S) as scores have it, (B, K, N / K, T, S); each size may be 1."""
    return [_by_key_head(x, num_heads if x.shape[1] > 1 else 1) for x in bias]


def _added(x, part, starts):
    """A sum, and what a block adds to a part of it that begins there."""
    starts = [0 if whole == 1 else start for whole, start in zip(x.shape, starts, strict=True)]
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, starts, part.shape) + part, starts)


def _sink(sinks, num_heads):
    """The sinks as scores of a block, (1, K, N / K, 1, 1)."""
    return sinks[0].astype(wide(sinks[0].dtype)).reshape(1, num_heads, -1, 1, 1)


def _seen(shape, segments, block, *, band, start):
    """Which keys the queries of a block see, broadcast to scores of this shape; None for all."""
    (begin, size, keys), (before, after) = block, band
    first_query, first_key = start or (0, 0)
    row = first_query + begin + jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    column = first_key + keys.start + jax.lax.broadcasted_iota(jnp.int32, shape, 4)
    parts = [] if after is None else [column - row <= after]
    parts += [] if before is None else [row - column <= before]
    if segments:
        parts += [(_cut(segments[0], begin, size, 1)[..., None] == segments[1][:, None, keys])[:, None, None]]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def in_blocks(q, k, v, segments, *, scale, band, cap=0, kept=None, sinks=(), bias=(), start=None, dtype=None):
    """Returns the output and the logarithm of each row's total weight; a query that sees no key gets zeros.

    `kept`, of class `KeptWeights`, says where dropout drops weights. The output is of `dtype`, by default that of the
    values.
    """
    dtype = dtype or v.dtype
    grouped, bias = _by_key_head(q, k.shape[1]), _grouped(bias, k.shape[1])
    about = {"scale": scale, "band": band, "cap": cap, "start": start, "bias": bias}

    def one(block, factors, sums):
        scores, _ = _scores(grouped, k, segments, block, **about)
        highest = jnp.max(scores, -1, keepdims=True, initial=jnp.finfo(scores.dtype).min)
        highest = jnp.maximum(highest, _sink(sinks, k.shape[1])) if sinks else highest
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, -1, keepdims=True)
        total = total + jnp.exp(_sink(sinks, k.shape[1]) - highest) if sinks else total
        total = jnp.where(total == 0, 1, total)
        weights = weights if factors is None else weights * factors
        seen = v[:, :, block[2]]
        out = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), seen, preferred_element_type=dtype)
        return (out / total.astype(dtype), (highest + jnp.log(total))[..., 0]), sums

    blocks = list(_blocks((q.shape[2], k.shape[2]), band, start, drops=kept is not None, is_biased=bool(bias)))
    (out, totals), _ = _run(one, blocks, kept, ())
    return out.reshape(*q.shape[:-1], v.shape[-1]), totals.reshape(q.shape[:-1])


def _run(one, blocks, kept, sums):
    """The rows that blocks of queries make, joined, and what they add to sums.

    `one(block, factors, sums)` gives both for a block: where its queries begin, how many they are, and the keys that
    they see. Blocks that all see the same keys run in a loop: XLA compiles one of them, and holds no more than one.
    """
    size, keys = blocks[0][0].stop, blocks[0][1]
    is_equal = all(seen == keys and queries.stop - queries.start == size for queries, seen in blocks)
    if len(blocks) > 1 and is_equal and (kept is None or kept.is_cut_into(blocks)):
        return _looped(one, (size, keys), len(blocks), kept, sums)
    made, factors_of = [], [None] * len(blocks) if kept is None else kept.factors(blocks)
    for (queries, keys), factors in zip(blocks, factors_of, strict=True):
        own, sums = one((queries.start, queries.stop - queries.start, keys), factors, sums)
        made.append(own)
    return [jnp.concatenate(rows, 3) for rows in zip(*made, strict=True)], sums


def _looped(one, block, num, kept, sums):
    """The same for so many blocks, of which each has so many queries, and the same keys."""
    size, keys = block
    num_drawn = num if kept is None else PIECES

    def at(number, drawn, sums):
        factors = None if kept is None else kept.of_piece(drawn, number % PIECES)
        return one((number * size, size, keys), factors, sums)

    def body(number, carry, drawn):
        own, sums = at(number, drawn, carry[1])
        rows = zip(carry[0], own, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(whole, part, number * size, 3) for whole, part in rows], sums

    made = jax.eval_shape(lambda: at(0, kept and kept.bits(0, keys), sums))
    rows = [jnp.zeros((*x.shape[:3], num * size, *x.shape[4:]), x.dtype) for x in made[0]]
    carry = vary_like((rows, sums), made)
    for first in range(0, num, num_drawn):
        drawn = None if kept is None else kept.bits(first // PIECES, keys)
        carry = jax.lax.fori_loop(first, first + num_drawn, functools.partial(body, drawn=drawn), carry)
    return carry


def in_blocks_backward(
    grad, saved, segments, *, scale, band, cap=0, kept=None, sinks=(), bias=(), start=None, dtype=None
):
    """Gradients of q, k, v, the sinks and a bias of numbers, of `saved = (q, k, v, out, log_total)`.

    Weights are computed again from their logarithmic totals; the barrier keeps XLA from doing so before `grad`. That of
    q is of `dtype`, by default its own, those of k and v are float32 at least.
    """
    shape = saved[0].shape
    grad, q, k, v, out, log_total = jax.lax.optimization_barrier((grad, *saved))
    q, grad, out, log_total = (_by_key_head(x, k.shape[1]) for x in (q, grad, out, log_total))
    along = jnp.sum((grad * out).astype(wide(q.dtype)), -1, keepdims=True)
    grouped = _grouped(bias, k.shape[1])
    about = {"scale": scale, "band": band, "cap": cap, "start": start, "bias": grouped}

    def one(block, factors, sums):
        (begin, size, keys), (grad_k, grad_v, *of_bias) = block, sums
        rows, grad_rows = _cut(q, begin, size), _cut(grad, begin, size)
        scores, slope = _scores(q, k, segments, block, **about)
        weights = jnp.exp(scores - _cut(log_total, begin, size)[..., None])
        grad_weights = jnp.einsum("bkgtd,bksd->bkgts", grad_rows, v[:, :, keys], preferred_element_type=wide(v.dtype))
        factors = 1 if factors is None else factors
        of_scores = weights * (factors * grad_weights - _cut(along, begin, size))
        of_bias = [_added(x, _summed(of_scores, x), (0, 0, 0, begin, keys.start)) for x in of_bias]
        grad_scores = (scale * slope * of_scores).astype(q.dtype)
        grad_q = jnp.einsum("bkgts,bksd->bkgtd", grad_scores, k[:, :, keys], preferred_element_type=dtype or q.dtype)
        of_keys = jnp.einsum("bkgts,bkgtd->bksd", grad_scores, rows)
        of_values = jnp.einsum("bkgts,bkgtd->bksd", (weights * factors).astype(v.dtype), grad_rows)
        grads = (_added(x, own, (0, 0, keys.start, 0)) for x, own in ((grad_k, of_keys), (grad_v, of_values)))
        return (grad_q,), (*grads, *of_bias)

    sums = [jnp.zeros(x.shape, wide(x.dtype)) for x in (k, v)]
    sums += [jnp.zeros(x.shape, wide(q.dtype)) for x in grouped if x.dtype != bool]
    blocks = list(_blocks((shape[2], k.shape[2]), band, start, drops=kept is not None, is_biased=bool(bias)))
    (grad_q,), (grad_k, grad_v, *of_bias) = _run(one, blocks, kept, tuple(sums))
    of_sinks = [_gradient_of_sinks(sink, along, log_total, k.shape[1]) for sink in sinks]
    grads_of_bias = (g.reshape(x.shape).astype(x.dtype) for g, x in zip(of_bias, bias, strict=False))
    return grad_q.reshape(shape), grad_k, grad_v, *of_sinks, *grads_of_bias


def _summed(grad, bias):
    """A gradient of scores, summed along the dims along which a bias is one and the same."""
    return jnp.sum(grad, [dim for dim, size in enumerate(bias.shape) if size == 1], keepdims=True)


def _gradient_of_sinks(sink, along, log_total, num_heads):
    """A sink takes from the weights, and with them from what they bring along, by its own weight."""
    taken = -jnp.exp(_sink([sink], num_heads)[..., 0] - log_total) * along[..., 0]
    return taken.sum((0, 3)).reshape(sink.shape).astype(sink.dtype)
