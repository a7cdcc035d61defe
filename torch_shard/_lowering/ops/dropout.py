"""Dropout: what is kept, of a whole tensor or of a part of it, drawn four at a time.

A call of threefry gives two words of 32 bits. Each decides for two elements, as it is and with its halves exchanged:
the first 16 bits decide alone but once in 65,536 times, so that the two are as good as independent, and each has its
exact probability. Under TPU's compiler (v5e) a dropout of (24, 512, 768) takes 0.10 Mcycles so, and 0.64 with a call
for each element; the program compiles in a quarter of the time.

Rows (the dim before the last) lie in groups of four pieces, of which a call draws for one row each. A place among all
calls says what is drawn, so that a part is drawn alone, and the same on every mesh.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.random import threefry2x32_p

from torch_shard._common.dtypes import numbers_of
from torch_shard._common.overrides import captured_op
from torch_shard._lowering.ops.random import check_drawn_from
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten

MOST_DRAWN = 1 << 32
"""Elements that places of one word count."""

_PIECES, _LONGEST = 4, 128
"""Pieces of a group, and rows of the longest: those of a block of attention."""


@captured_op("torch_shard::seed", "() -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def _two_words():
    return torch.empty(2, dtype=torch.int32)


@captured_op("torch_shard::kept", "(Tensor seed, SymInt[] shape, float dropout) -> Tensor")
def _booleans(seed, shape, *_):
    return seed.new_empty(shape, dtype=torch.bool)


@lowers(torch.ops.torch_shard.seed.default, random=True)
def seed_of(key):
    """The two words of a key of threefry, as int32; of another key, two that are drawn by it."""
    words = jax.random.key_data(key)
    words = words if words.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


@lowers(aten.native_dropout.default, random=True)
def native_dropout(key, x, p, train):
    """What is kept, scaled, and the mask."""
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    mask = _bernoulli(key, 1 - p, x.shape)
    return native_dropout_backward(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(grad, mask, scale):
    """What is kept, scaled; the rest times zero, which NaN and infinity outlast."""
    return jnp.where(mask, grad * np.asarray(scale, grad.dtype), grad * np.asarray(0, grad.dtype))


@lowers(aten.bernoulli.p, random=True)
def bernoulli_p(key, x, p=0.5):
    """As eager torch draws for dropout."""
    return numbers_of(_bernoulli(key, p, x.shape), x.dtype)


def _bernoulli(key, share, shape):
    """Such a share of booleans; a key that is not threefry's, and a shape too large, take JAX's own draw."""
    check_drawn_from(0 <= share <= 1, "a probability from 0 to 1", share)
    is_ours = jax.random.key_data(key).shape == (2,) and math.prod(shape) < MOST_DRAWN and 0 < share < 1
    return _drawn(seed_of(key), share, shape) if is_ours else jax.random.bernoulli(key, share, shape)


@lowers(torch.ops.torch_shard.kept.default)
def kept(seed, shape, dropout):
    """What dropout keeps of a tensor of this shape, as booleans."""
    return _drawn(seed, 1 - dropout, shape)


def _drawn(seed, share, shape):
    *lead, length, width = (1,) * (2 - len(shape)) + tuple(shape)
    piece = _rows_of_piece(length)
    num_groups = -(-length // (_PIECES * piece))
    own = [_places(0, size) for size in (*lead, min(length, num_groups * piece), width)]
    drawn = [_is_among(words, share) for words in _four_words(seed, (*lead, num_groups * piece, width), own)]
    if length <= piece:
        return drawn[0].reshape(shape)
    groups = jnp.stack([x.reshape(*lead, num_groups, piece, width) for x in drawn], -3)
    return groups.reshape(*lead, -1, width)[..., :length, :].reshape(shape)


def _rows_of_piece(length):
    """A quarter of all, in whole tiles of 32 rows, as bytes lie; no more than a block of attention has."""
    return min(_LONGEST, -(-length // (32 * _PIECES)) * 32)


def _is_among(words, share):
    """Tell which are among such a share of all words; exact to one of them."""
    return words <= np.uint32(max(math.ceil(share * 2**32), 1) - 1)


def _four_words(seed, sizes, at):
    """Words for four elements, of the calls at these places of each dim, among all calls: as many as the sizes say."""
    strides = [np.uint32(math.prod(sizes[dim + 1 :]) % MOST_DRAWN) for dim in range(len(sizes))]
    along = [index.reshape(-1, *(1,) * (len(at) - 1 - dim)) for dim, index in enumerate(at)]
    places = sum((index * stride for index, stride in zip(along[:-1], strides, strict=False)), jnp.uint32(0))
    places = places + along[-1]  # of a row, once
    first, second = jax.lax.bitcast_convert_type(seed, jnp.uint32)
    given = (jnp.broadcast_to(word, places.shape) for word in (first, second))
    high, low = threefry2x32_p.bind(*given, jnp.zeros_like(places), places)
    return high, _exchanged(high), low, _exchanged(low)


def _exchanged(words):
    """Its halves, exchanged."""
    return (words << 16) | (words >> 16)


class KeptWeights:
    """Which weights of attention are kept, block by block."""

    def __init__(self, q, k, seed, dropout, *, of=None, start=(0, 0, 0, 0)):
        grouped = q.shape[1] // k.shape[1]
        num_rows, num_heads, length, num_keys = of or (*q.shape[:3], k.shape[2])
        self._seed, self._dropout, self._first = seed, dropout, start[2:]
        self._piece = _rows_of_piece(length)
        self._group = _PIECES * self._piece
        self._sizes = (num_rows, num_heads // grouped, grouped, -(-length // self._group) * self._piece, num_keys)
        self._lead = (_places(start[0], len(q)), _places(start[1], k.shape[1]), _places(0, grouped))
        is_whole = isinstance(start[2], int) and not start[2]
        self._starts_a_group = is_whole or not q.shape[2] % self._group

    def factors(self, blocks):
        """For each block `(queries, keys)` the factors of its weights, (B, K, N / K, queries, keys)."""
        drawn = self._of_pieces(blocks) if self._starts_a_group else map(self._one_by_one, blocks)
        scale = np.float32(1 / (1 - self._dropout))
        return [jnp.where(each, scale, np.float32(0)) for each in drawn]

    def _of_pieces(self, blocks):
        """What is kept in blocks of whole groups, each drawn once for all keys that a block sees."""
        groups, piece = {}, self._piece
        for queries, keys in blocks:
            parts = []
            for number in range(queries.start // piece, -(-queries.stop // piece)):
                group, at = divmod(number, _PIECES)
                if group not in groups:
                    groups[group] = self._of_group(group, blocks)
                first, drawn = groups[group]
                begin, end = (min(max(row - number * piece, 0), piece) for row in (queries.start, queries.stop))
                parts.append(drawn[at][..., begin:end, keys.start - first : keys.stop - first])
            yield parts[0] if len(parts) == 1 else jnp.concatenate(parts, 3)

    def _of_group(self, number, blocks):
        begin, end = number * self._group, (number + 1) * self._group
        seen = [keys for queries, keys in blocks if queries.start < end and queries.stop > begin]
        keys = slice(min(each.start for each in seen), max(each.stop for each in seen))
        rows = _places(self._first[0] // self._group * self._piece + number * self._piece, self._piece)
        drawn = [_is_among(words, 1 - self._dropout) for words in self._words(rows, keys)]
        bits = functools.reduce(jnp.bitwise_or, (each.astype(jnp.uint32) << at for at, each in enumerate(drawn)))
        bits = jax.lax.optimization_barrier(
            bits.astype(jnp.uint8)
        )  # held as bytes, and not as words or drawn again for each block
        return keys.start, [bits & np.uint8(1 << at) != 0 for at in range(_PIECES)]

    def _one_by_one(self, block):
        """What is kept in a block that begins anywhere: a call for each weight."""
        queries, keys = block
        rows = _places(self._first[0] + queries.start, queries.stop - queries.start)
        words = self._words(rows // self._group * self._piece + rows % self._piece, keys)
        number = (rows // self._piece % _PIECES)[:, None]
        number = jnp.broadcast_to(number, words[0].shape).astype(jnp.int32)
        return _is_among(jax.lax.select_n(number, *words), 1 - self._dropout)

    def _words(self, rows, keys):
        of_keys = _places(self._first[1] + keys.start, keys.stop - keys.start)
        return _four_words(self._seed, self._sizes, (*self._lead, rows, of_keys))


def _places(first, size):
    return jnp.asarray(first).astype(jnp.uint32) + jnp.arange(size, dtype=jnp.uint32)
