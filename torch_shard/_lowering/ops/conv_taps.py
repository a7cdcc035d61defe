"""A convolution of each channel by itself, of a few taps along a sequence, as a sum of shifted products.

Mamba's and those of other short filters. XLA splits such a sum over channels as it likes; of a convolution each device
is given all channels, as the partitioner errs where channels are split (see `conv`).
"""

import functools

import jax
import jax.numpy as jnp

from torch_shard._common.dtypes import widened

_MOST_TAPS = 8


def padding_of_taps(x, weight, settings):
    """The padding of a convolution that is one of taps; None of another one."""
    stride, padding, dilation, transposed, _, groups = settings
    is_alone = weight.ndim == 3 and weight.shape[:2] == (groups, 1) and x.shape[-2] == groups
    is_plain = not transposed and tuple(stride) == tuple(dilation) == (1,)
    is_short = weight.shape[-1] <= _MOST_TAPS and jnp.issubdtype(x.dtype, jnp.floating)
    return padding[0] if is_alone and is_plain and is_short else None


def _shifted(x, num_taps, padding):
    """What each tap sees, of a sequence with zeros at both ends."""
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (padding, padding)])
    length = x.shape[-1] - num_taps + 1
    return [widened(jax.lax.slice_in_dim(x, tap, tap + length, axis=-1)) for tap in range(num_taps)]


def by_taps(x, weight, padding):
    """`(..., channels, steps)`, wide."""
    seen = _shifted(x, weight.shape[-1], padding)
    return functools.reduce(jnp.add, (each * widened(weight[:, 0, tap, None]) for tap, each in enumerate(seen)))


def by_taps_backward(grad, x, weight, padding):
    """Gradients of x, of the weight and of the bias."""
    num_taps = weight.shape[-1]
    back = by_taps(grad, jnp.flip(weight, -1), num_taps - 1)
    grad_x = jax.lax.slice_in_dim(back, padding, padding + x.shape[-1], axis=-1)
    rows = tuple(dim for dim in range(x.ndim) if dim != x.ndim - 2)
    per_tap = [jnp.sum(each * widened(grad), rows) for each in _shifted(x, num_taps, padding)]
    found = grad_x, jnp.stack(per_tap, -1)[:, None], jnp.sum(widened(grad), rows)
    return tuple(g.astype(like.dtype) for g, like in zip(found, (x, weight, weight), strict=True))
