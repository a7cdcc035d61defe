"""Convolution and pooling, forward and backward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._common.dtypes import jax_dtype, widened
from torch_shard._lowering.ops.registry import in_float32, lowers
from torch_shard._lowering.rows import on_rows

aten = torch.ops.aten

_SUBLANES = 8
"""Rows of a tile of TPUs."""


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
    if _takes_patches(weight, stride, padding, dilation, groups):
        return _of_patches(x, weight)
    return _correlate(x, weight, stride, [(p, p) for p in padding], (1,) * rank, dilation, groups)


def _takes_patches(weight, stride, padding, dilation, groups):
    """Tell whether a convolution takes an image apart into patches, of few channels: a product of matrices.

    XLA:TPU compiles the gradient of ViT's kernel, (768, 3, 16, 16), for 23 s as a convolution.
    """
    kernel = weight.shape[2:]
    is_apart = tuple(stride) == kernel and not any(padding) and set(dilation) == {1} and groups == 1
    return is_apart and weight.shape[1] < _SUBLANES and math.prod(kernel) > 1


def _of_patches(x, weight):
    kernel = weight.shape[2:]
    counts = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    x = x[(..., *(slice(n * k) for n, k in zip(counts, kernel, strict=True)))]
    x = x.reshape(*x.shape[:2], *(size for pair in zip(counts, kernel, strict=True) for size in pair))
    places, within = [range(first, 2 + 2 * len(kernel), 2) for first in (2, 3)]
    return jnp.einsum(x, range(x.ndim), weight, (x.ndim, 1, *within), (0, x.ndim, *places))


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
    """Along each dim, the index of every element of every window, (windows, elements): -1 for padding."""
    counts = _num_windows(shape, kernel, stride, padding, dilation, ceil_mode)
    for size, k, s, p, d, count in zip(shape, kernel, stride, padding, dilation, counts, strict=True):
        index = np.arange(count, dtype=np.int32)[:, None] * s - p + np.arange(k, dtype=np.int32) * d
        yield np.where((index >= 0) & (index < size), index, -1)


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    """Values and flat indices of the first largest element of each window; what nobody reads XLA does not compute."""
    settings = _pool_settings(kernel, stride, padding, dilation, ceil_mode)
    _, where = _largest(x, list(_windows(x.shape[-len(settings[0]) :], *settings)))
    return _reduce_windows(x, _lowest(x), jax.lax.max, settings), where


def _lowest(x):
    return -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min


@lowers(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_with_indices_backward(grad, x, kernel, stride, padding, dilation, ceil_mode, indices):
    """To the first largest element of each window; without the indices, where XLA has an operator for it."""
    settings = _pool_settings(kernel, stride, padding, dilation, ceil_mode)
    if any(step != 1 for step in settings[3]):
        return _scatter_back(len(settings[0]), grad, x, indices)
    return local_vjp(lambda x: _reduce_windows(x, _lowest(x), jax.lax.max, settings), x, cotangent=grad)[1][0]


def _scatter_back(rank, grad, x, *others):
    """Each gradient to the place that its value came from, as the last argument says."""
    rows, pooled = math.prod(x.shape[:-rank]), math.prod(grad.shape[-rank:])
    flat = jnp.zeros((rows, math.prod(x.shape[-rank:])), grad.dtype)
    places = jnp.arange(rows)[:, None], others[-1].reshape(rows, pooled)
    return flat.at[places].add(grad.reshape(rows, pooled)).reshape(x.shape)


for _rank in (2, 3):
    for _pool in ("adaptive_max_pool", "fractional_max_pool"):
        lowers(getattr(aten, f"{_pool}{_rank}d_backward").default)(functools.partial(_scatter_back, _rank))


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
    matrices = []
    for size, out in zip(x.shape[-len(output_size) :], output_size, strict=True):
        weights = np.zeros((out, size), np.float64)
        for i in range(out):
            start, end = i * size // out, -(-(i + 1) * size // out)
            weights[i, start:end] = 1 / (end - start)
        matrices.append(weights)
    return weighted(x, matrices)


def weighted(x, matrices):
    """Weighted sums along the last dims, by a matrix (out, size) for each."""
    for axis, matrix in enumerate(matrices, x.ndim - len(matrices)):
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(matrix, x.dtype), (axis, 1)), -1, axis)
    return x


def _adaptive_avg_pool_backward(rank, grad, x):
    return local_vjp(lambda x: adaptive_avg_pool(x, grad.shape[-rank:]), x, cotangent=grad)[1][0]


for _rank in (2, 3):
    _backward = functools.partial(_adaptive_avg_pool_backward, _rank)
    lowers(getattr(aten, f"_adaptive_avg_pool{_rank}d_backward").default)(_backward)


def _largest(x, per_dim):
    """Values of the last dims and their flat indices, of the first largest element of each window.

    By dim, the indices of windows are (..., windows, elements), -1 for what is no element.
    """
    space, sizes = x.shape[-len(per_dim) :], [index.shape[-2] for index in per_dim]
    index, lead = _combine(per_dim, space), x.shape[: x.ndim - len(per_dim)]
    flat = x.reshape(*lead, math.prod(space))
    index = jnp.broadcast_to(index, (*lead, *index.shape[-2:]))
    windows = jnp.where(index >= 0, jnp.take_along_axis(flat[..., None, :], jnp.maximum(index, 0), -1), _lowest(x))
    best = jnp.argmax(windows, axis=-1)[..., None]
    values, where = (jnp.take_along_axis(of, best, -1).reshape(*lead, *sizes) for of in (windows, index))
    return values, where.astype(jax_dtype(torch.int64))


def _combine(per_dim, shape):
    """Flat index of every element of every window from the indices by dim, each (..., windows, elements)."""
    flat, *others = per_dim
    for index, size in zip(others, shape[1:], strict=True):
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
    space = x.shape[-len(output_size) :]
    return _largest(x, list(map(_adaptive_windows, space, output_size)))


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
    return _largest(x, per_dim)


def _fractional_starts(sample, size, out, kernel):
    alpha = (size - kernel) / max(out - 1, 1)
    steps = jnp.arange(out, dtype=sample.dtype) + sample[..., None]
    starts = (steps * np.asarray(alpha, sample.dtype)).astype(jnp.int32)
    starts -= (sample * np.asarray(alpha, sample.dtype)).astype(jnp.int32)[..., None]
    return starts.at[..., -1].set(size - kernel)


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


# A convolution of each channel by itself, of a few taps along a sequence, as a sum of shifted products.
#
# Mamba's and those of other short filters. XLA splits such a sum over channels as it likes; of a convolution each
# device is given all channels, as the partitioner errs where channels are split (see `conv`).


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
