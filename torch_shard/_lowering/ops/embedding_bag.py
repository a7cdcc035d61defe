"""Embedding bags: sums, means and maxima of rows of a table, bag by bag."""

import jax
import jax.numpy as jnp
import torch

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
