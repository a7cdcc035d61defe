"""Dropout of attention's weights block by block: it drops what a draw for all weights at once would drop.

Each random number is made of its own place among all of them (partitionable threefry, JAX's default since 0.5), so that
those of a block can be drawn alone. Under another generator all are drawn, as booleans, and blocks are cut out.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.random import threefry2x32_p

from torch_shard._lowering.ops.registry import lowers

MOST_DRAWN = 1 << 32
"""Places that one word counts."""


@torch.library.custom_op("torch_shard::seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _seed() -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_seed.register_fake
def _two_words() -> torch.Tensor:
    return torch.empty(2, dtype=torch.int32)


@torch.library.custom_op("torch_shard::kept", mutates_args=())
def _kept(seed: torch.Tensor, shape: list[int], dropout: float) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_kept.register_fake
def _booleans(seed: torch.Tensor, shape: list[int], dropout: float) -> torch.Tensor:
    return seed.new_empty(shape, dtype=torch.bool)


@lowers(torch.ops.torch_shard.seed.default, random=True)
def seed_of(key):
    """The two words of a key of threefry, as int32; of another key, two that are drawn by it."""
    words = jax.random.key_data(key)
    words = words if words.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


@lowers(torch.ops.torch_shard.kept.default)
def kept(seed, shape, dropout):
    """What `native_dropout` would keep of a tensor of this shape."""
    key = jax.random.wrap_key_data(jax.lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
    return jax.random.bernoulli(key, 1 - dropout, tuple(shape))


def kept_in(q, k, seed, dropout, *, of=None, start=(0, 0, 0, 0)):
    """`(queries, keys) -> factors_BKGTS` of weights (B, N, T, S), N = K * G; None without dropout.

    Args:
        q: Queries, (B, N, T, D).
        k: Keys, (B, K, S, D).
        seed: One, or none without dropout.
        dropout: The share that is dropped.
        of: The shape (B, N, T, S) of all weights, where these are a part of them.
        start: Where that part starts, for (B, K, T, S).
    """
    if not dropout:
        return None
    own = (len(q), k.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])
    num_rows, num_heads, *lengths = of or (own[0], own[1] * own[2], *own[3:])
    shape, scale = (num_rows, num_heads // own[2], own[2], *lengths), np.float32(1 / (1 - dropout))
    start = (*start[:2], 0, *start[2:])

    def place(queries, keys):
        return (*own[:3], queries.stop - queries.start, keys.stop - keys.start), (
            *start[:3],
            start[3] + queries.start,
            start[4] + keys.start,
        )

    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        whole = kept(seed[0], shape, dropout)

        def cut(queries, keys):
            block, first = place(queries, keys)
            return jax.lax.dynamic_slice(whole, first, block) * scale

        return cut
    words = jax.lax.bitcast_convert_type(seed[0], jnp.uint32)
    most = np.uint32(math.ceil(np.float32(1 - dropout) * 2**23) * 2**9 - 1)  # of those with a number below 1 - dropout
    return lambda queries, keys: jnp.where(_bits(words, shape, *place(queries, keys)) <= most, scale, np.float32(0))


def _bits(words, shape, block, first):
    """The bits of a block, from this place on, among `jax.random.bits(key, shape)`.

    By the first 23 of each, `jax.random.uniform` makes a number.
    """
    rows = (*block[:4], 1)
    begins = jnp.full(rows, first[4], jnp.uint32)
    for dim in range(4):
        size = np.uint32(math.prod(shape[dim + 1 :]) % MOST_DRAWN)
        begins += (jax.lax.broadcasted_iota(jnp.uint32, rows, dim) + jnp.uint32(first[dim])) * size
    places = begins + jax.lax.broadcasted_iota(jnp.uint32, block, 4)
    high, low = threefry2x32_p.bind(*(jnp.broadcast_to(w, block) for w in words), jnp.zeros_like(places), places)
    return high ^ low
