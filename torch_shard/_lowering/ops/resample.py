"""Sampling at computed places: grid_sample, and the resampling of images with its gradient."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._lowering.ops.registry import in_float32, lowers

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = range(3)

ZEROS, BORDER, REFLECTION = range(3)


@lowers(aten.grid_sampler_3d.default)
def grid_sampler(x, grid, mode, padding, align_corners):
    """`x` (N, C, *space) at `grid` (N, *out, rank), whose last entry counts along the last dim of space."""
    space = x.shape[2:]
    coords = [_unnormalized(grid[..., len(space) - 1 - dim], size, align_corners) for dim, size in enumerate(space)]
    if mode == BICUBIC:
        taps = [_cubic_taps(c, size, padding, align_corners) for c, size in zip(coords, space, strict=True)]
    else:
        padded = [_padded(c, size, padding, align_corners) for c, size in zip(coords, space, strict=True)]
        taps = [_nearest_taps(c) if mode == NEAREST else _linear_taps(c) for c in padded]
    out = jnp.zeros((), x.dtype)
    for corner in itertools.product(*taps):
        weight = functools.reduce(jnp.multiply, [w for _, w in corner])
        out = out + _gather(x, [i for i, _ in corner]) * weight[:, None]
    return out


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
@in_float32
def grid_sampler_backward(grad, x, grid, mode, padding, align_corners, output_mask):
    _, grads = local_vjp(lambda x, grid: grid_sampler(x, grid, mode, padding, align_corners), x, grid, cotangent=grad)
    return tuple(g if asked else None for g, asked in zip(grads, output_mask, strict=True))


def _unnormalized(g, size, align_corners):
    return (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2


def _padded(c, size, padding, align_corners):
    if padding == ZEROS:
        return c
    if padding == REFLECTION:
        c = _reflected(c, 0, size - 1) if align_corners else _reflected(c, -0.5, size - 0.5)
    return jnp.where(c > 0, jnp.where(c < size - 1, c, size - 1), 0)  # torch's derivative at the border is zero


def _reflected(c, low, high):
    span = high - low
    if span == 0:
        return jnp.zeros_like(c)
    away = jnp.where(c < low, low - c, c - low)
    extra = jnp.fmod(away, jnp.asarray(span, c.dtype))
    flips = jnp.floor(away / span)
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _nearest_taps(c):
    return [(jnp.round(c).astype(jnp.int32), jnp.ones_like(c))]


def _linear_taps(c):
    low = jnp.floor(c)
    return [(low.astype(jnp.int32), low + 1 - c), (low.astype(jnp.int32) + 1, c - low)]


def _cubic_taps(c, size, padding, align_corners):
    low = jnp.floor(c)
    t = c - low
    places = [low - 1, low, low + 1, low + 2]
    weights = [_cubic(t + 1, -0.75), _cubic(t, -0.75), _cubic(1 - t, -0.75), _cubic(2 - t, -0.75)]
    return [
        (_padded(jax.lax.stop_gradient(p), size, padding, align_corners).astype(jnp.int32), w)
        for p, w in zip(places, weights, strict=True)
    ]


def _cubic(x, a):
    """Keys' cubic kernel, for x >= 0."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    lib = np if isinstance(x, np.ndarray) else jnp
    return lib.where(x <= 1, near, lib.where(x < 2, far, 0))


def _gather(x, places):
    """X (N, C, *space) at one index per dim, each (N, *out); zero outside."""
    space = x.shape[2:]
    flat, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for index, size in zip(places, space, strict=True):
        inside = inside & (index >= 0) & (index < size)
        flat = flat * size + jnp.clip(index, 0, max(size - 1, 0))
    out = flat.shape[1:]
    index = flat.reshape(flat.shape[0], 1, math.prod(out))
    values = jnp.take_along_axis(x.reshape(*x.shape[:2], math.prod(space)), index, axis=2)
    return jnp.where(inside[:, None], values.reshape(*x.shape[:2], *out), 0)


def _scale(size, out, align_corners, scale):
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / scale if scale else size / out


def _filtered(radius, kernel, align_corners, size, out, scale):
    """Antialiasing: indices and weights (out, taps) of a kernel that is as wide as the step."""
    step = _scale(size, out, align_corners, scale)
    support, shrink = (radius * step, 1 / step) if step >= 1 else (float(radius), 1.0)
    centre = step * (np.arange(out) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(int), 0)
    count = np.minimum((centre + support + 0.5).astype(int), size) - first
    index = first[:, None] + np.arange(count.max(initial=1))
    weight = np.asarray(kernel(np.abs((index - centre[:, None] + 0.5) * shrink)))
    weight = np.where(np.arange(index.shape[1]) < count[:, None], weight, 0)
    return np.clip(index, 0, size - 1), weight / weight.sum(1, keepdims=True)


def _triangle(x):
    return np.maximum(0, 1 - x)


def _lanczos(x):
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _nearest(exact, size, out, scale):
    step = np.float32(_scale(size, out, False, scale))  # torch computes the places in float32
    places = (np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)) * step
    return np.minimum(places.astype(int), size - 1)[:, None], np.ones((out, 1))


def _resample(x, taps):
    """Weighted sums along the last dims, one `(indices, weights)` of shape (out, taps) for each."""
    for position, (index, weight) in enumerate(taps):
        axis = x.ndim - len(taps) + position
        spread = (-1, *(1,) * (x.ndim - 1 - axis))
        parts = [
            jnp.take(x, index[:, tap], axis=axis) * jnp.asarray(weight[:, tap].reshape(spread), x.dtype)
            for tap in range(index.shape[1])
        ]
        x = functools.reduce(jnp.add, parts)
    return x


def _resample_back(grad, input_size, taps):
    return local_vjp(lambda x: _resample(x, taps), jnp.zeros(input_size, grad.dtype), cotangent=grad)[1][0]


def _by_dim(taps, space, output_size, scales):
    return [taps(*sizes) for sizes in zip(space, output_size, scales or (None,) * len(space), strict=True)]


def _nearest_backward(exact, grad, output_size, input_size, *scales):
    taps = _by_dim(functools.partial(_nearest, exact), input_size[2:], output_size, scales)
    return _resample_back(grad, input_size, taps)


for _rank in (1, 2, 3):
    for _name, _exact in {"upsample_nearest": False, "_upsample_nearest_exact": True}.items():
        _backward = functools.partial(_nearest_backward, _exact)
        lowers(getattr(aten, f"{_name}{_rank}d_backward").default)(_backward)


def _antialiased(radius, kernel):
    def taps(space, output_size, align_corners, *scales):
        filtered = functools.partial(_filtered, radius, kernel, align_corners)
        return _by_dim(filtered, space, output_size, scales)

    def forward(x, output_size, *options):
        return _resample(x, taps(x.shape[2:], output_size, *options))

    def backward(grad, output_size, input_size, *options):
        return _resample_back(grad, input_size, taps(input_size[2:], output_size, *options))

    return forward, backward


_FILTERS = {
    "bilinear": (1, _triangle),
    "bicubic": (2, lambda x: _cubic(x, -0.5)),
    "lanczos": (3, _lanczos),
}

for _name, (_radius, _kernel) in _FILTERS.items():
    if hasattr(aten, f"_upsample_{_name}2d_aa"):  # lanczos came with torch 2.13
        _forward, _backward = _antialiased(_radius, _kernel)
        lowers(getattr(aten, f"_upsample_{_name}2d_aa").default)(_forward)
        lowers(getattr(aten, f"_upsample_{_name}2d_aa_backward").default)(_backward)
