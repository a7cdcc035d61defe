"""Sampling at computed places: grid_sample, and the resampling of images with its gradient."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._lowering.ops.conv import weighted
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

    def of_image(x, *at):
        return x.at[(slice(None), *at)].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return jax.vmap(of_image)(x, *places)


def _step(size, out, align_corners, scale):
    """How far apart two places are of which values are wanted."""
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / scale if scale else size / out


def _by_dim(of_dim, space, output_size, scales):
    return [of_dim(*sizes) for sizes in zip(space, output_size, scales or (None,) * len(space), strict=True)]


def _nearest_backward(exact, grad, output_size, input_size, *scales):
    def place(size, out, scale):
        step = np.float32(_step(size, out, False, scale))  # torch computes the places in float32
        places = (np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)) * step
        return np.minimum(places.astype(int), size - 1)

    def forward(x):
        for dim, index in enumerate(_by_dim(place, input_size[2:], output_size, scales)):
            x = jnp.take(x, index, axis=2 + dim)
        return x

    return _backward_of(forward, grad, input_size)


def _backward_of(forward, grad, input_size):
    return local_vjp(forward, jnp.zeros(input_size, grad.dtype), cotangent=grad)[1][0]


for _rank in (1, 2, 3):
    for _name, _exact in {"upsample_nearest": False, "_upsample_nearest_exact": True}.items():
        _backward = functools.partial(_nearest_backward, _exact)
        lowers(getattr(aten, f"{_name}{_rank}d_backward").default)(_backward)


def _antialiased(kernel, x, output_size, align_corners, *scales):
    """By a kernel that is as wide as the step."""

    def matrix(size, out, scale):
        step = _step(size, out, align_corners, scale)
        apart = np.arange(size) + 0.5 - step * (np.arange(out)[:, None] + 0.5)
        weights = kernel(np.abs(apart) / max(step, 1))
        return weights / weights.sum(1, keepdims=True)

    is_of_bytes = not jnp.issubdtype(x.dtype, jnp.floating)
    matrices = _by_dim(matrix, x.shape[2:], output_size, scales)
    found = weighted(x.astype(jnp.float32) if is_of_bytes else x, matrices)
    return jnp.clip(jnp.round(found), 0, 255) if is_of_bytes else found


def _antialiased_backward(kernel, grad, output_size, input_size, *options):
    return _backward_of(lambda x: _antialiased(kernel, x, output_size, *options), grad, input_size)


_KERNELS = {
    "bilinear": lambda x: np.maximum(1 - x, 0),
    "bicubic": lambda x: _cubic(x, -0.5),
    "lanczos": lambda x: np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0),
}

for _name, _kernel in _KERNELS.items():
    if hasattr(aten, f"_upsample_{_name}2d_aa"):  # lanczos came with torch 2.13
        lowers(getattr(aten, f"_upsample_{_name}2d_aa").default)(functools.partial(_antialiased, _kernel))
        _backward = functools.partial(_antialiased_backward, _kernel)
        lowers(getattr(aten, f"_upsample_{_name}2d_aa_backward").default)(_backward)
