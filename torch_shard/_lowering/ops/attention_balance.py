"""Attention under a causal mask, so that all devices of a context compute as much.

Of 2n chunks of the sequence device i of n has 2i and 2i + 1, in order: its later queries see more keys, and the last
device computes twice the mean. Each gives its second chunk to device n - 1 - i and takes that one's: then it has 2i
and 2n - 1 - 2i, of which the sum is the same everywhere. The same exchange gives results back, so that only attention
sees another order of tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Place = jax.Array | int

CHUNK, FEWEST = 512, 4096
"""Kernels take blocks of so many queries, which shall not be smaller for it; and an exchange of half of the queries
takes longer than it saves where there are few: for v5e and v5p that is below about so many."""


def why_unbalanced(mode, lengths, band, num, *, has_kernel):
    """Say why devices compute the queries that they have; empty if they exchange some to compute as much."""
    if mode == "heads":
        return "each has all queries of its heads"
    if mode == "gather" and not has_kernel:
        return "without a kernel they compute what a mask hides, too, and so the same"
    if lengths[0] != lengths[1]:
        return f"they are {lengths[0]}, and their keys {lengths[1]}"
    if band[1] != 0 or (mode == "gather" and band[0] is not None):
        return "their queries see about as many keys everywhere"
    if mode == "gather" and (lengths[0] % (2 * num * CHUNK) or lengths[0] < FEWEST):
        return f"that takes {FEWEST} queries at least, and a multiple of {2 * CHUNK} on each"
    return "their parts have no halves" if lengths[0] % (2 * num) else ""


def exchanged(x: jax.Array, axis: str, dim: int = 2) -> jax.Array:
    """The chunks that a device of the axis computes, of those that it has; and back."""
    num = lax.axis_size(axis)
    first, second = jnp.split(x, 2, dim)
    return jnp.concatenate((first, lax.ppermute(second, axis, [(i, num - 1 - i) for i in range(num)])), dim)


def chunks_of(device: Place, num: int) -> tuple[Place, Place]:
    """Which two of 2 * num chunks a device computes."""
    return 2 * device, 2 * (num - 1 - device) + 1


def balanced_order(length: int, num: int) -> np.ndarray:
    """The places of all tokens, as devices compute them."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * num, -1)
    return np.concatenate([chunks[at] for device in range(num) for at in chunks_of(device, num)])


def pairs_of(step: int, device: Place, num: int) -> list[tuple[Place, Place]]:
    """Which of its two chunks of queries see which of two chunks of keys, in a round of a ring.

    That is what a causal mask leaves, as much on each device: its later queries see the earlier keys of any other, and
    either its earlier queries those too, or its later queries the later keys.
    """
    (a, b), (c, d) = (chunks_of(at, num) for at in (device, (device - step) % num))
    of_queries, of_keys = (jnp.int32(first > second) for first, second in ((a, b), (c, d)))  # the earlier ones
    if not step:
        return [(0, 0), (1, 1), (1 - of_queries, of_queries)]
    is_after = jnp.minimum(a, b) > jnp.minimum(c, d)
    queries, keys = (jnp.where(is_after, of, 1 - of) for of in (of_queries, of_keys))
    return [(1 - of_queries, of_keys), (queries, keys)]
