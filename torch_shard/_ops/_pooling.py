"""Adaptive and fractional max pooling: values and flat indices of the largest element of each window."""

import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._common.dtypes import jax_dtype
from torch_shard._ops._conv import flatten_space, scatter_back
from torch_shard._ops._registry import lowers

aten = torch.ops.aten


def _largest(x, index, rank):
    """Values and indices of the largest of each window; `index` is (..., window, element of it), -1 for none."""
    flat = flatten_space(x, rank)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    index = jnp.broadcast_to(index, (*flat.shape[:-1], *index.shape[-2:]))
    gathered = jnp.take_along_axis(flat[..., None, :], jnp.maximum(index, 0), -1)
    windows = jnp.where(index >= 0, gathered, lowest)
    best = jnp.argmax(windows, axis=-1)[..., None]
    return tuple(jnp.take_along_axis(values, best, -1)[..., 0] for values in (windows, index))


def _combine(per_dim, shape):
    """Flat index of every element of every window from the indices by dim, each (..., windows, elements)."""
    flat = None
    for index, size in zip(per_dim, shape, strict=True):
        if flat is None:
            flat = index
            continue
        pairs = jnp.where(
            (flat[..., :, None, :, None] >= 0) & (index[..., None, :, None, :] >= 0),
            flat[..., :, None, :, None] * size + index[..., None, :, None, :],
            -1,
        )
        *outer, a, b, c, d = pairs.shape
        flat = pairs.reshape(*outer, a * b, c * d)
    return flat


def _adaptive_windows(size, out):
    starts = [i * size // out for i in range(out)]
    ends = [-(-(i + 1) * size // out) for i in range(out)]
    widest = max((e - s for s, e in zip(starts, ends, strict=True)), default=0)
    index = np.array(starts, np.int32).reshape(-1, 1) + np.arange(widest, dtype=np.int32)
    return jnp.asarray(np.where(index < np.array(ends, np.int32).reshape(-1, 1), index, -1))


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(x, output_size):
    rank = len(output_size)
    space = x.shape[-rank:]
    per_dim = [_adaptive_windows(size, out) for size, out in zip(space, output_size, strict=True)]
    return _shaped(x, _largest(x, _combine(per_dim, space), rank), output_size)


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(x, kernel_size, output_size, random_samples):
    rank = len(output_size)
    space = x.shape[-rank:]
    samples = random_samples.reshape(*x.shape[:-rank], rank) if x.ndim > rank + 1 else random_samples[0]
    # torch draws the widths first in 2-D, and in order in 3-D.
    order = reversed(range(2)) if rank == 2 else range(3)
    starts = [
        _fractional_starts(samples[..., draw], *sizes)
        for draw, *sizes in zip(order, space, output_size, kernel_size, strict=True)
    ]
    per_dim = [s[..., None] + jnp.arange(k) for s, k in zip(starts, kernel_size, strict=True)]
    return _shaped(x, _largest(x, _combine(per_dim, space), rank), output_size)


def _fractional_starts(sample, size, out, kernel):
    alpha = (size - kernel) / max(out - 1, 1)
    steps = jnp.arange(out, dtype=sample.dtype) + sample[..., None]
    starts = (steps * np.asarray(alpha, sample.dtype)).astype(jnp.int32)
    starts -= (sample * np.asarray(alpha, sample.dtype)).astype(jnp.int32)[..., None]
    return starts.at[..., -1].set(size - kernel)


def _shaped(x, values_and_indices, output_size):
    values, indices = values_and_indices
    shape = (*x.shape[: x.ndim - len(output_size)], *output_size)
    return values.reshape(shape), indices.reshape(shape).astype(jax_dtype(torch.int64))


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad, x, indices):
    return scatter_back(grad, x, indices, 2)


@lowers(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad, x, indices):
    return scatter_back(grad, x, indices, 3)


@lowers(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def fractional_max_pool_backward(grad, x, kernel_size, output_size, indices):
    return scatter_back(grad, x, indices, len(output_size))


@lowers(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(grad, x, padding):
    """Each element of the input gathers the gradients of its copies."""

    def forward(x):
        for position in range(len(padding) // 2):
            axis = x.ndim - 1 - position
            before, after = padding[2 * position : 2 * position + 2]
            taken = np.clip(np.arange(-before, x.shape[axis] + after), 0, x.shape[axis] - 1)
            x = jnp.take(x, taken, axis=axis)
        return x

    return local_vjp(forward, x, cotangent=grad)[1][0]
