"""Normalisation, attention's softmax and embeddings, with the statistics and masks that PyTorch returns."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec
from torch.fx import Node

from torch_shard._common.dtypes import jax_dtype, widened
from torch_shard._common.fx import args_of, shape_of
from torch_shard._lowering.constraints import Constraint, Placed, lies
from torch_shard._lowering.ops.indexing import outside_if_negative
from torch_shard._lowering.ops.registry import in_float32, lowers
from torch_shard._lowering.rows import RowSplit, whole_if_uneven

aten = torch.ops.aten


@lowers(aten._softmax.default)
def softmax(x, dim, half_to_float):
    x = x.astype(jnp.float32) if half_to_float else x
    return _softmax(x, dim) if x.ndim else jnp.ones_like(x)


def _softmax(x, dim):
    exps = jnp.exp(widened(x) - widened(jnp.max(x, axis=dim, keepdims=True, initial=-jnp.inf)))
    return (exps / jnp.sum(exps, axis=dim, keepdims=True)).astype(x.dtype)


@lowers(aten._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    """Softmax that gives zeros for a row of nothing but -inf."""
    x = x.astype(jax_dtype(dtype)) if dtype is not None else x
    highest = jnp.max(x, axis=dim, keepdims=True, initial=-jnp.inf)
    exps = jnp.exp(x - jnp.where(jnp.isneginf(highest), 0, highest))
    total = jnp.sum(exps, axis=dim, keepdims=True)
    return exps / jnp.where(total == 0, 1, total)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(grad, output, dim, input_dtype):
    dim = dim if output.ndim else None
    weighted = grad * output
    result = weighted - output * jnp.sum(weighted, axis=dim, keepdims=True)
    return result.astype(jax_dtype(input_dtype))


@lowers(aten._log_softmax.default)
def log_softmax(x, dim, half_to_float):
    x = x.astype(jnp.float32) if half_to_float else x
    return jax.nn.log_softmax(widened(x), axis=dim).astype(x.dtype) if x.ndim else jnp.zeros_like(x)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad, output, dim, input_dtype):
    dim = dim if output.ndim else None
    result = grad - jnp.exp(output) * jnp.sum(grad, axis=dim, keepdims=True)
    return result.astype(jax_dtype(input_dtype))


@lowers(aten.native_layer_norm.default)
def native_layer_norm(x, normalized_shape, weight, bias, eps):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    compute = widened(x)
    mean = jnp.mean(compute, axes, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(compute - mean), axes, keepdims=True) + eps)
    out = (compute - mean) * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.astype(x.dtype), mean, rstd


@lowers(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    inner = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    normed = (widened(x) - mean) * rstd
    scaled = widened(grad) if weight is None else widened(grad) * weight
    average = jnp.mean(scaled, inner, keepdims=True)
    projection = jnp.mean(scaled * normed, inner, keepdims=True)
    grad_x = (scaled - average - normed * projection) * rstd if output_mask[0] else None
    grad_weight = jnp.sum(grad * normed, outer) if output_mask[1] and weight is not None else None
    grad_bias = jnp.sum(grad, outer) if output_mask[2] and bias is not None else None
    return _cast(grad_x, x), _cast(grad_weight, weight), _cast(grad_bias, bias)


@lowers(aten.native_group_norm.default)
def native_group_norm(x, weight, bias, rows, channels, inner, groups, eps):
    compute = widened(x).reshape(rows, groups, channels // groups * inner)
    mean = jnp.mean(compute, 2, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(compute - mean), 2, keepdims=True) + eps)
    out = ((compute - mean) * rstd).reshape(rows, channels, inner)
    out = out if weight is None else out * weight[:, None]
    out = out if bias is None else out + bias[:, None]
    return out.reshape(x.shape).astype(x.dtype), mean[..., 0], rstd[..., 0]


def _cast(value, like):
    return None if value is None else value.astype(like.dtype)


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """Returns `(out, saved mean, saved rstd, new running mean, new running var)`."""
    axes = (0, *range(2, x.ndim))
    compute = widened(x)
    if not training:
        out = _normalize(compute, running_mean, jax.lax.rsqrt(running_var + eps), weight, bias)
        empty = jnp.zeros((0,), compute.dtype)
        return out.astype(x.dtype), empty, empty, running_mean, running_var
    mean, var = _moments(x, compute, axes, running_mean)
    rstd = jax.lax.rsqrt(var + eps)
    out = _normalize(compute, mean, rstd, weight, bias).astype(x.dtype)
    if running_mean is not None:
        count = x.size // x.shape[1]
        unbiased = var * (count / (count - 1))  # torch keeps the unbiased estimate, and refuses a count of 1
        running_mean = ((1 - momentum) * running_mean + momentum * mean).astype(running_mean.dtype)
        running_var = ((1 - momentum) * running_var + momentum * unbiased).astype(running_var.dtype)
    return out, mean, rstd, running_mean, running_var


def _moments(x, compute, axes, about):
    """Mean and variance over `axes`; of bfloat16 in one pass, which XLA makes part of what computes `x`.

    The variance is then a mean of squares less the square of a mean, both about the running mean, which is near. It is
    off by about 2**-22 of the square of the distance to that, where the rounding of the values themselves to bfloat16
    adds 2**-18 of the square of the mean.
    """
    if x.dtype != jnp.bfloat16 or about is None:
        mean = jnp.mean(compute, axes)
        return mean, jnp.mean(jnp.square(compute - _channels(mean, x.ndim)), axes)
    away = compute - _channels(about, x.ndim)
    mean = jnp.mean(away, axes)
    return mean + about, jnp.maximum(jnp.mean(jnp.square(away), axes) - jnp.square(mean), 0)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return batch_norm_functional(x, weight, bias, None, None, training, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps):
    return batch_norm_functional(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_rstd, training, eps, output_mask):
    axes = (0, *range(2, x.ndim))
    compute = widened(x)
    mean, rstd = (save_mean, save_rstd) if training else (running_mean, jax.lax.rsqrt(running_var + eps))
    normed, grad = (compute - _channels(mean, x.ndim)) * _channels(rstd, x.ndim), grad.astype(compute.dtype)
    scale = _channels(rstd if weight is None else rstd * weight, x.ndim)
    grad_bias = jnp.sum(grad, axes)
    grad_weight = jnp.sum(grad * normed, axes)
    centred = grad
    if training:
        count = x.size // x.shape[1]
        centred = grad - (_channels(grad_bias, x.ndim) + normed * _channels(grad_weight, x.ndim)) / count
    mask_w, mask_b = output_mask[1] and weight is not None, output_mask[2]
    grad_x = (centred * scale).astype(x.dtype)
    return grad_x, grad_weight if mask_w else None, grad_bias if mask_b else None


def _channels(stat, rank):
    return stat.reshape(1, -1, *(1,) * (rank - 2))


def _normalize(x, mean, rstd, weight, bias):
    out = (x - _channels(mean, x.ndim)) * _channels(rstd, x.ndim)
    out = out if weight is None else out * _channels(weight, x.ndim)
    return out if bias is None else out + _channels(bias, x.ndim)


@lowers(aten.embedding.default)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return jnp.take(weight, outside_if_negative(indices, len(weight)), axis=0)


@lowers(aten.embedding_dense_backward.default, on_mesh=True)
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq, *, split=None):
    flat, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if scale_grad_by_freq:
        (counted,) = whole_if_uneven([flat], split)
        counts = jnp.zeros((num_weights,), grad.dtype).at[counted].add(1)
        rows = rows / counts[flat][:, None]
    if padding_idx >= 0:
        rows = jnp.where((flat == padding_idx)[:, None], 0, rows)
    return _sums_of_rows(rows, flat, num_weights)


@in_float32
def _sums_of_rows(rows, places, num):
    return jnp.zeros((num, rows.shape[-1]), rows.dtype).at[places].add(rows)


@lies(aten.embedding_dense_backward.default)
def _by_features(node: Node, split: RowSplit) -> Placed:
    """The gradient of what was looked up, split along its features over the devices that share the batch (FSDP).

    Each then adds up its own features of all tokens. With more tokens than the table has rows, XLA's partitioner lets
    each make the whole table of its own tokens, to be summed over the devices; with fewer it splits them the same way.
    """
    shape, num_weights = shape_of(args_of(node)[0]), args_of(node)[2]
    axes = tuple(axis for axis in split.data_axes if split.mesh.shape[axis] > 1)
    num_tokens, num_shards = math.prod(shape[:-1]), split.size_of(axes)
    if not split.kept or shape[-1] % num_shards:
        return
    if split.context is not None and len(axes) > 1:  # XLA moves no two axes at once
        return
    if num_weights <= num_tokens <= num_weights * num_shards:  # of more tokens, tables are fewer bytes
        spec = PartitionSpec(*(None for _ in shape[:-1]), axes)
        yield 0, Constraint(spec, "a table's gradient is summed by features")


@lowers(aten.embedding_renorm.default, on_mesh=True)
def embedding_renorm(weight, indices, max_norm, norm_type, *, split=None):
    """Rows that are looked up, scaled down to a norm of at most `max_norm`."""
    (flat,) = whole_if_uneven([indices.reshape(-1)], split)
    used = jnp.zeros((weight.shape[0], 1), bool).at[flat].set(True)
    norm = jnp.linalg.norm(weight, norm_type, 1, keepdims=True)
    return jnp.where(used & (norm > max_norm), weight * (max_norm / (norm + 1e-7)), weight)


@lowers(aten.gelu.default)
def gelu(x, *, approximate="none"):
    return jax.nn.gelu(x) if approximate == "tanh" else x * _normal_cdf(x)


def _normal_cdf(x):
    return 0.5 * (1 + jax.lax.erf(x * np.asarray(0.5**0.5, x.dtype)))


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad, v, g, norm, dim):
    others = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    along = jnp.sum(grad * v, others, keepdims=True)
    return (grad - v * along / jnp.square(norm)) * (g / norm), along / norm
