"""Random bits without memory: JAX's own stream, written so that a compiler fuses it into whatever uses it.

On the CPU, JAX's threefry is a loop whose counters lie in memory, three times as large as the result. The same numbers
come here from twenty rounds in a row, which are element by element and so need no memory, on whatever shards they lie.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry_prng_impl

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

_PARITY = 0x1BD11BDA  # Salmon et al. 2011, Threefry-2x32 with 20 rounds


def _threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = high + keys[0], low + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def counters(shape: tuple[int, ...], limit: int = 1 << 32) -> tuple[jax.Array, jax.Array]:
    """Two words that number the elements; in the order of memory, as JAX does, while one word is enough."""
    high, low, stride = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        if stride * shape[dim] <= limit:
            low, stride = low + index * jnp.uint32(stride % (1 << 32)), stride * shape[dim]
        else:  # numbered in the other word, in which the dims before it that went there come first
            high = high + index * jnp.uint32(math.prod(shape[dim + 1 :]) // stride)
    return high, low


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    x, y = _threefry(key, *counters(tuple(shape)))
    if bit_width == 64:
        return (x.astype(jnp.uint64) << 32) | y.astype(jnp.uint64)
    return (x ^ y).astype(f"uint{bit_width}")


FUSED = define_prng_impl(
    key_shape=threefry_prng_impl.key_shape,
    seed=threefry_prng_impl.seed,
    split=threefry_prng_impl.split,
    fold_in=threefry_prng_impl.fold_in,
    random_bits=_random_bits,
    name="threefry2x32_fused",
    tag="fused",
)
"""For `jax.random.key(seed, impl=FUSED)`; up to 2**32 elements the numbers are those of `jax.random.key(seed)`."""
