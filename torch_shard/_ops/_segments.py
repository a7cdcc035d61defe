"""Reductions of segments that follow each other along a dim."""

import jax.numpy as jnp
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._ops._registry import lowers

aten = torch.ops.aten
_START = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}


def _bounds(data, lengths, offsets, axis):
    """First and last-plus-one place of each segment: (*outer dims, segments)."""
    if offsets is None:
        ends = jnp.cumsum(lengths, axis=axis)
        return ends - lengths, ends
    return jnp.take(offsets, jnp.arange(offsets.shape[axis] - 1), axis), jnp.take(
        offsets, jnp.arange(1, offsets.shape[axis]), axis
    )


def _members(data, lengths, offsets, axis):
    """Whether each place along `axis` is in each segment: (*outer, segments, length, 1 for every inner dim)."""
    starts, ends = (bound[..., None] for bound in _bounds(data, lengths, offsets, axis))
    places = jnp.arange(data.shape[axis])
    inside = (places >= starts) & (places < ends)
    return inside.reshape(*inside.shape, *(1,) * (data.ndim - axis - 1))


def _neutral_reduction(data, reduce, members, axis, initial):
    start = _START[reduce] if initial is None else initial
    spread = jnp.where(members, jnp.expand_dims(data, axis), _START[reduce] if reduce != "mean" else 0)
    if reduce == "prod":
        return jnp.prod(spread, axis + 1) * start
    if reduce in ("max", "min"):
        reduction, pair = (jnp.max, jnp.maximum) if reduce == "max" else (jnp.min, jnp.minimum)
        return pair(reduction(spread, axis + 1, initial=_START[reduce]), start)
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
    spread, grad, output = (
        jnp.expand_dims(data, axis),
        jnp.expand_dims(grad, axis + 1),
        jnp.expand_dims(output, axis + 1),
    )
    if reduce in ("max", "min"):
        hits = members & (spread == output)
        share = jnp.where(hits, grad / jnp.maximum(jnp.sum(hits, axis + 1, keepdims=True), 1), 0)
    elif reduce == "mean":
        share = jnp.where(members, grad / jnp.maximum(jnp.sum(members, axis + 1, keepdims=True), 1), 0)
    elif reduce == "sum":
        share = jnp.where(members, grad, 0)
    else:
        grad = jnp.squeeze(grad, axis + 1)
        return local_vjp(lambda x: _neutral_reduction(x, "prod", members, axis, initial), data, cotangent=grad)[1][0]
    return jnp.sum(share, axis)
