"""Embedding bags: sums, means and maxima of rows of a table, bag by bag."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._common.dtypes import jax_dtype
from torch_shard._lowering.ops.indexing import outside_if_negative
from torch_shard._lowering.ops.normalisation import embedding_dense_backward
from torch_shard._lowering.ops.registry import in_float32, lowers
from torch_shard._lowering.rows import whole_if_uneven

aten = torch.ops.aten

SUM, MEAN, MAX = range(3)


def _bag_of(indices, offsets):
    """The bag that each index is in."""
    positions = jnp.arange(indices.shape[0])
    return jnp.searchsorted(offsets, positions, side="right") - 1


@lowers(aten._embedding_bag.default, on_mesh=True)
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
    *,
    split=None,
):
    """Returns `(bags, bag of each index, counted indices of each bag, row of each maximum)`."""
    num_bags = offsets.shape[0] - include_last_offset
    bags = _bag_of(indices, offsets[:num_bags])
    counted = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    ones, of_bags = whole_if_uneven([counted.astype(offsets.dtype), bags], split)
    sizes = jax.ops.segment_sum(ones, of_bags, num_bags)
    rows = jnp.take(weight, outside_if_negative(indices, len(weight)), axis=0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if mode == MAX:
        out, maxima = _maxima(rows, indices, bags, counted, num_bags)
    else:
        out, maxima = _sums(jnp.where(counted[:, None], rows, 0), bags, num_bags), sizes
        out = out / jnp.maximum(sizes, 1)[:, None].astype(out.dtype) if mode == MEAN else out
    # PyTorch's kernel leaves the bags out where it does not need them; so does ours, whose backward finds them itself.
    needs_bags = mode != SUM or padding_idx >= 0 or weight.dtype not in (jnp.float32, jnp.float16)
    return out, bags if needs_bags else bags[:0], sizes, maxima.astype(jax_dtype(torch.int64))


@lowers(aten._embedding_bag_forward_only.default, on_mesh=True)
def embedding_bag_forward_only(weight, indices, offsets, *args, **kwargs):
    out, bags, sizes, maxima = embedding_bag(weight, indices, offsets, *args, **kwargs)
    return out, bags, jnp.pad(sizes, (0, offsets.shape[0] - sizes.shape[0])), maxima


@in_float32
def _sums(rows, bags, num_bags):
    return jax.ops.segment_sum(rows, bags, num_bags)


def _maxima(rows, indices, bags, counted, num_bags):
    """The largest of each bag and the index that it came from, the first of equals; 0 and -1 for an empty bag."""
    masked = jnp.where(counted[:, None], rows, -jnp.inf)
    largest = jax.ops.segment_max(masked, bags, num_bags)
    count = rows.shape[0]
    is_first = (masked == largest[bags]) & counted[:, None]
    places = jnp.where(is_first, jnp.arange(count)[:, None], count)
    first = jax.ops.segment_min(places, bags, num_bags)
    is_there = first < count
    chosen = indices[jnp.minimum(first, max(count - 1, 0))] if count else jnp.zeros_like(first)
    return jnp.where(is_there, largest, 0).astype(rows.dtype), jnp.where(is_there, chosen, -1)


@lowers(aten._embedding_bag_backward.default, on_mesh=True)
@in_float32
def embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
    *,
    split=None,
):
    if sparse:
        raise NotImplementedError("embedding_bag(sparse=True) has a sparse gradient, and JAX arrays are dense.")
    if mode == MAX:
        table = jnp.zeros((num_weights, grad.shape[-1]), grad.dtype)
        columns = jnp.broadcast_to(jnp.arange(grad.shape[-1]), maximum_indices.shape)
        return table.at[jnp.where(maximum_indices < 0, num_weights, maximum_indices), columns].add(grad, mode="drop")
    rows = grad / jnp.maximum(bag_size, 1)[: grad.shape[0], None].astype(grad.dtype) if mode == MEAN else grad
    rows = rows[_bag_of(indices, offsets)]  # an offset behind the last index changes nothing
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    return embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq, split=split)


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    bags = _bag_of(indices, offsets)
    along = jnp.sum(grad[bags] * jnp.take(weight, indices, axis=0), axis=-1)
    return jnp.where(indices != padding_idx, along, 0)


# Reductions of segments that follow each other along a dim.


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
