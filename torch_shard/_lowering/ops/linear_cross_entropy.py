"""The chunked form of `linear_cross_entropy` (torch 2.13 on): XLA chunks as it sees fit, so the sums are plain."""

import contextlib

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.axes import local_vjp
from torch_shard._lowering.ops.registry import lowers

with contextlib.suppress(ImportError):  # it registers the operators, and PyTorch imports it at the first call
    import torch.nn.modules.linear_cross_entropy

library = torch.ops.torch_nn


def _losses(x, weight, bias, target, class_weight, ignore_index, smoothing):
    """The loss of each row and what it counts for in a mean."""
    logits = x @ weight.T
    logp = jax.nn.log_softmax(logits if bias is None else logits + bias, axis=-1)
    scale = jnp.ones((logp.shape[-1],), logp.dtype) if class_weight is None else class_weight
    if jnp.issubdtype(target.dtype, jnp.floating):
        wanted = target * (1 - smoothing) + smoothing / target.shape[-1]
        return -jnp.sum(logp * wanted * scale, -1), jnp.ones(target.shape[:-1], logp.dtype)
    counted = target != ignore_index
    hits = jax.nn.one_hot(target, logp.shape[-1], dtype=logp.dtype)
    hits = jnp.where(counted[:, None], hits, 0) * scale
    flat = -jnp.sum(logp * scale, -1) / logp.shape[-1]
    loss = (1 - smoothing) * -jnp.sum(hits * logp, -1) + smoothing * jnp.where(counted, flat, 0)
    in_range = ~counted | ((target >= 0) & (target < logp.shape[-1]))
    return jnp.where(in_range, loss, jnp.nan), jnp.sum(hits, -1)  # torch raises; a program can only be loud


def chunked(x, weight, target, bias, class_weight, reduction, ignore_index, smoothing, size, policy, dtype, *flags):
    """Returns `(loss, gradients by x, weight and bias)`; those that are not asked for are empty."""

    def reduced(x, weight, bias):
        losses, counts = _losses(x, weight, bias, target, class_weight, ignore_index, smoothing)
        return jnp.sum(losses) / (jnp.sum(counts) if reduction == "mean" else 1)

    loss, found = local_vjp(reduced, x, weight, jnp.zeros(weight.shape[:1], x.dtype) if bias is None else bias)
    grads = zip(found, flags[1:], [(0, 0), (0, 0), (0,)], strict=True)
    return loss, *(grad if asked else jnp.zeros(empty, x.dtype) for grad, asked, empty in grads)


if hasattr(library, "_linear_cross_entropy_batch_chunked"):
    lowers(library._linear_cross_entropy_batch_chunked.default)(chunked)


def chunked_no_reduction(x, weight, target, bias, class_weight, ignore_index, size, policy, dtype):
    return _losses(x, weight, bias, target, class_weight, ignore_index, 0.0)[0]


if hasattr(library, "_linear_cross_entropy_batch_chunked_no_reduction"):
    lowers(library._linear_cross_entropy_batch_chunked_no_reduction.default)(chunked_no_reduction)
