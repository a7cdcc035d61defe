"""Convolution and pooling, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._common.dtypes import jax_dtype
from torch_shard._lowering.ops.conv_taps import by_taps, by_taps_backward, padding_of_taps
from torch_shard._lowering.ops.registry import in_float32, lowers
from torch_shard._lowering.rows import on_rows

aten = torch.ops.aten


def _per_dim(value, rank):
    value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return value * rank if len(value) == 1 else value


@lowers(aten.convolution.default, on_mesh=True)
def convolution(x, weight, bias, *settings, split=None):
    if (padding := padding_of_taps(x, weight, settings)) is not None:
        out = by_taps(x, weight, padding)
        return (out if bias is None else out + bias.astype(out.dtype)[:, None]).astype(x.dtype)
    unbatched = x.ndim == weight.ndim - 1

    def run(x, weight):
        return (_convolve(x, weight, *settings),), ()

    ((out,), _) = on_rows(run, [x[None] if unbatched else x], [weight], split)
    out = out if bias is None else out + bias.reshape(1, -1, *(1,) * (weight.ndim - 2))
    return out[0] if unbatched else out


def _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups):
    rank = weight.ndim - 2
    stride, padding, dilation = (_per_dim(v, rank) for v in (stride, padding, dilation))
    if transposed:
        return _transposed(x, weight, stride, padding, dilation, _per_dim(output_padding, rank), groups)
    return _correlate(x, weight, stride, [(p, p) for p in padding], (1,) * rank, dilation, groups)


def _correlate(x, weight, stride, padding, x_dilation, dilation, groups):
    return jax.lax.conv_general_dilated(
        x, weight, stride, padding, lhs_dilation=x_dilation, rhs_dilation=dilation, feature_group_count=groups
    )


def _transposed(x, weight, stride, padding, dilation, output_padding, groups):
    """Convolution by the input-dilated, flipped kernel; weight is (in, out / groups, *kernel)."""
    kernel = weight.shape[2:]
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    swapped = jnp.swapaxes(grouped, 1, 2).reshape(groups * weight.shape[1], weight.shape[0] // groups, *kernel)
    flipped = jnp.flip(swapped, axis=tuple(range(2, weight.ndim)))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return _correlate(x, flipped, (1,) * len(kernel), pads, stride, dilation, groups)


@lowers(aten.convolution_backward.default, on_mesh=True)
def convolution_backward(grad, x, weight, bias_sizes, *settings_and_mask, split=None):
    """Gradients of the input, of the weight and of the bias, each device of its rows.

    XLA's partitioner errs in convolutions whose kernels, channels or dims of space are split (jaxlib 0.10.2;
    tests/system/test_upstream.py).
    """
    *settings, output_mask = settings_and_mask
    if (padding := padding_of_taps(x, weight, settings)) is not None:
        found = by_taps_backward(grad, x, weight, padding)
        return tuple(g if asked else None for g, asked in zip(found, output_mask, strict=True))
    unbatched = x.ndim == weight.ndim - 1
    batched = [array[None] if unbatched else array for array in (grad, x)]
    run = functools.partial(_gradients, settings=settings, on_mesh=split is not None)
    (grad_x,), (grad_weight,) = on_rows(run, batched, [weight], split)
    space = tuple(i for i in range(grad.ndim) if i != grad.ndim - weight.ndim + 1)
    grads = (grad_x[0] if unbatched else grad_x, grad_weight, jnp.sum(grad, space) if output_mask[2] else None)
    return tuple(g if asked else None for g, asked in zip(grads, output_mask, strict=True))


def _gradients(grad, x, weight, *, settings, on_mesh):
    """Those of x and of the weight."""
    grad_x, grad_weight = local_vjp(lambda *given: _convolve(*given, *settings), x, weight, cotangent=grad)[1]
    stride, padding, dilation, transposed, _, groups = settings
    if groups > 1 and not on_mesh:
        steps, windowed = (x, grad) if transposed else (grad, x)
        grad_weight = _grouped_weight_gradient(steps, windowed, weight, stride, padding, dilation, groups)
    return (grad_x,), (grad_weight,)


def _grouped_weight_gradient(grad, x, weight, stride, padding, dilation, groups):
    """By windows of x, not by a convolution: XLA's partitioner multiplies that one by the size of the other mesh axes.

    (jaxlib 0.10.2, a convolution with batch_group_count whose batch is split; tests/system/test_upstream.py.)
    Of a transposed convolution x and the gradient change places.
    """
    kernel, space = weight.shape[2:], grad.shape[2 - weight.ndim :]
    rank = len(kernel)
    stride, padding, dilation = (_per_dim(v, rank) for v in (stride, padding, dilation))
    x = x.reshape(-1, groups, weight.shape[1], *x.shape[-rank:])
    grad = grad.reshape(-1, groups, weight.shape[0] // groups, *space)
    x = jnp.pad(x, [(0, 0)] * 3 + [(p, p + s) for p, s in zip(padding, stride, strict=True)])
    axes = tuple(range(3, 3 + rank))
    per_offset = []
    for offset in np.ndindex(*kernel):
        starts = [o * d for o, d in zip(offset, dilation, strict=True)]
        cuts = [slice(a, a + s * n, s) for a, s, n in zip(starts, stride, space, strict=True)]
        window = x[(slice(None), slice(None), slice(None), *cuts)]
        per_offset.append(jnp.einsum(grad, (0, 1, 2, *axes), window, (0, 1, 9, *axes), (1, 2, 9)))
    return jnp.stack(per_offset, -1).reshape(weight.shape)


def _num_windows(shape, kernel, stride, padding, dilation, ceil_mode):
    """How many windows there are along each dim; one that would begin in the padding behind does not count."""
    counts = []
    for size, k, s, p, d in zip(shape, kernel, stride, padding, dilation, strict=True):
        span = size + 2 * p - d * (k - 1) - 1
        count = (-(-span // s) if ceil_mode else span // s) + 1
        counts.append(count - 1 if ceil_mode and (count - 1) * s >= size + p else count)
    return tuple(counts)


def _reduce_windows(x, identity, reduce, settings):
    """Each window of the last dims reduced, where the padding is `identity`; `settings` as `_num_windows` has them."""
    kernel, stride, padding, dilation = settings[:4]
    rank = len(kernel)
    space = x.shape[-rank:]
    counts = _num_windows(space, *settings)
    pads = [  # behind: as far as the last window reaches, which may be less than the input
        (p, (n - 1) * s + d * (k - 1) + 1 - size - p)
        for size, k, s, p, d, n in zip(space, kernel, stride, padding, dilation, counts, strict=True)
    ]
    lead = x.ndim - rank
    cut = x[(..., *(slice(size + min(behind, 0)) for size, (_, behind) in zip(space, pads, strict=True)))]
    pads = [(before, max(behind, 0)) for before, behind in pads]
    return jax.lax.reduce_window(
        cut,
        np.asarray(identity, x.dtype),
        reduce,
        (*(1,) * lead, *kernel),
        (*(1,) * lead, *stride),
        [*[(0, 0)] * lead, *pads],
        window_dilation=(*(1,) * lead, *dilation),
    )


def _pool_settings(kernel, stride, padding, dilation=1, ceil_mode=False):
    rank = 3 if len(kernel) == 3 else 2
    kernel, padding, dilation = (_per_dim(value, rank) for value in (kernel, padding, dilation))
    return kernel, _per_dim(stride, rank) if stride else kernel, padding, dilation, ceil_mode


def _windows(shape, kernel, stride, padding, dilation, ceil_mode):
    """Flat input index of every element of every window, -1 for padding: (number of windows, window size)."""
    per_dim, counts = [], _num_windows(shape, kernel, stride, padding, dilation, ceil_mode)
    for size, k, s, p, d, count in zip(shape, kernel, stride, padding, dilation, counts, strict=True):
        index = np.arange(count)[:, None] * s - p + np.arange(k)[None] * d
        per_dim.append(np.where((index >= 0) & (index < size), index, -1))
    rank = len(shape)
    flat = np.zeros((), np.int64)
    valid = np.ones((), bool)
    for axis, index in enumerate(per_dim):
        spread = index.reshape(
            [index.shape[0] if i == axis else 1 for i in range(rank)]
            + [index.shape[1] if i == axis else 1 for i in range(rank)]
        )
        flat, valid = flat * shape[axis] + spread, valid & (spread >= 0)
    flat = np.where(valid, flat, -1).reshape(int(np.prod(counts)), -1)
    return flat, counts


def flatten_space(x, rank):
    return x.reshape(*x.shape[:-rank], int(np.prod(x.shape[-rank:])))


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    """Values and flat indices of the first largest element of each window; what nobody reads XLA does not compute."""
    settings = _pool_settings(kernel, stride, padding, dilation, ceil_mode)
    rank = len(settings[0])
    index, counts = _windows(x.shape[-rank:], *settings)
    flat, lowest = flatten_space(x, rank), _lowest(x)
    windows = jnp.where(index >= 0, flat[..., np.maximum(index, 0)], lowest)
    best = jnp.argmax(windows, axis=-1)
    where = jnp.take_along_axis(jnp.broadcast_to(index, windows.shape), best[..., None], -1)[..., 0]
    where = where.reshape(*x.shape[:-rank], *counts).astype(jax_dtype(torch.int64))
    return _reduce_windows(x, lowest, jax.lax.max, settings), where


def _lowest(x):
    return -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min


@lowers(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_with_indices_backward(grad, x, kernel, stride, padding, dilation, ceil_mode, indices):
    """To the first largest element of each window; without the indices, where XLA has an operator for it."""
    settings = _pool_settings(kernel, stride, padding, dilation, ceil_mode)
    if any(step != 1 for step in settings[3]):
        return scatter_back(grad, x, indices, len(settings[0]))
    return local_vjp(lambda x: _reduce_windows(x, _lowest(x), jax.lax.max, settings), x, cotangent=grad)[1][0]


def scatter_back(grad, x, indices, rank):
    """Each gradient to the place that its value came from."""
    rows, pooled = int(np.prod(x.shape[:-rank])), int(np.prod(grad.shape[-rank:]))
    flat = jnp.zeros((rows, int(np.prod(x.shape[-rank:]))), grad.dtype)
    row = jnp.arange(rows)[:, None]
    return flat.at[row, indices.reshape(rows, pooled)].add(grad.reshape(rows, pooled)).reshape(x.shape)


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
@in_float32
def avg_pool(x, kernel, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    settings = _pool_settings(kernel, stride, padding, ceil_mode=ceil_mode)
    total = _reduce_windows(x, 0, jax.lax.add, settings)
    divisor = divisor_override or _window_sizes(x.shape[-len(settings[0]) :], settings, count_include_pad)
    return total / np.asarray(divisor, x.dtype)


def _window_sizes(space, settings, count_include_pad):
    """Number of elements that torch divides each window's sum by: padding counts or not, what lies beyond it never."""
    sizes = []
    kernel, stride, padding = settings[:3]
    counts = _num_windows(space, *settings)
    for size, k, s, p, count in zip(space, kernel, stride, padding, counts, strict=True):
        start = np.arange(count) * s - p
        end = np.minimum(start + k, size + p)
        sizes.append(end - start if count_include_pad else np.minimum(end, size) - np.maximum(start, 0))
    return functools.reduce(np.multiply.outer, sizes)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
@in_float32
def avg_pool_backward(grad, x, *args):
    return local_vjp(lambda x: avg_pool(x, *args), x, cotangent=grad)[1][0]


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x, output_size):
    for offset, out in enumerate(output_size):
        axis = x.ndim - len(output_size) + offset
        size = x.shape[axis]
        weights = np.zeros((out, size), np.float64)
        for i in range(out):
            start, end = i * size // out, -(-(i + 1) * size // out)
            weights[i, start:end] = 1 / (end - start)
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(weights, x.dtype), (axis, 1)), -1, axis)
    return x


@lowers(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(grad, x):
    return local_vjp(lambda x: adaptive_avg_pool(x, grad.shape[-2:]), x, cotangent=grad)[1][0]


@lowers(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(grad, x):
    return local_vjp(lambda x: adaptive_avg_pool(x, grad.shape[-3:]), x, cotangent=grad)[1][0]


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
@in_float32
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
