"""Reductions of segments that follow each other along a dim."""

import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten

_START = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}


def _members(data, lengths, offsets, axis):
    """Tell whether each place along `axis` is in each segment: (*outer, segments, length, 1 for every inner dim)."""
    if offsets is None:
        ends = jnp.cumsum(lengths, -1)
        starts = ends - lengths
    else:
        starts, ends = offsets[..., :-1], offsets[..., 1:]
    places = jnp.arange(data.shape[axis])
    inside = (places >= starts[..., None]) & (places < ends[..., None])
    return inside.reshape(*inside.shape, *(1,) * (data.ndim - axis - 1))


def _neutral_reduction(data, reduce, members, axis, initial):
    start = _START[reduce] if initial is None else initial
    spread = jnp.where(members, jnp.expand_dims(data, axis), _START[reduce] if reduce != "mean" else 0)
    if reduce == "prod":
        return jnp.prod(spread, axis + 1) * start
    if reduce in ("max", "min"):
        found = (jnp.max if reduce == "max" else jnp.min)(spread, axis + 1, initial=_START[reduce])
        return jnp.where(found > start if reduce == "min" else found < start, start, found)
    total = jnp.sum(spread, axis + 1) + start
    if reduce == "sum":
        return total
    count = jnp.sum(members, axis + 1)
    empty = jnp.nan if initial is None else initial
    return jnp.where(count == 0, empty, total / jnp.maximum(count, 1))


@lowers(aten.segment_reduce.default)
def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    axis %= data.ndim
    members = _members(data, lengths, offsets, axis)
    return _neutral_reduction(data, reduce, members, axis, initial).astype(data.dtype)


@lowers(aten._segment_reduce_backward.default)
def segment_reduce_backward(grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    """Equal maxima share the gradient, as in PyTorch."""
    axis %= data.ndim
    members = _members(data, lengths, offsets, axis)
    return local_vjp(lambda x: _neutral_reduction(x, reduce, members, axis, initial), data, cotangent=grad)[1][0]


def _distance_gradient(grad, diff, dist, p):
    """Derivative of |diff|_p times `grad`; `grad` and `dist` broadcast against `diff`."""
    sign, size = jnp.sign(diff), jnp.abs(diff)
    if p == 0:
        return jnp.zeros_like(diff)
    if p == 1:
        return grad * sign
    if p == jnp.inf:
        return grad * sign * (size == dist)
    apart = dist != 0
    safe = jnp.where(apart, dist, 1)
    if p == 2:
        return jnp.where(apart, grad * diff / safe, 0)
    if p < 2:
        apart = apart & ((p >= 1) | (size != 0))
        size = jnp.where(size == 0, 0 if p >= 1 else 1, size)
    return jnp.where(apart, sign * size ** (p - 1) * grad / safe ** (p - 1), 0)


@lowers(aten._cdist_backward.default)
def cdist_backward(grad, x1, x2, p, cdist):
    diff = x1[..., :, None, :] - x2[..., None, :, :]
    per_point = jnp.sum(_distance_gradient(grad[..., None], diff, cdist[..., None], p), axis=-2)
    return per_point if diff.size else jnp.zeros(x1.shape, x1.dtype)  # autograd sums over what was broadcast


@lowers(aten._pdist_backward.default)
def pdist_backward(grad, x, p, pdist):
    first, second = np.triu_indices(x.shape[0], 1)
    per_pair = _distance_gradient(grad[:, None], x[first] - x[second], pdist[:, None], p)
    return jnp.zeros_like(x).at[first].add(per_pair).at[second].add(-per_pair)
