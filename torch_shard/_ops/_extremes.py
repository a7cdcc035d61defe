"""Largest and smallest along a dim, with their places."""

import jax.numpy as jnp
import torch

from torch_shard._ops._registry import lowers

aten = torch.ops.aten


@lowers(aten.max.dim)
def max_dim(x, dim, keepdim=False):
    """Returns `(values, indices)`; a NaN wins, and of equals the first."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    return jnp.max(x, axis=dim, keepdims=keepdim), jnp.argmax(x, axis=dim, keepdims=keepdim)


@lowers(aten.min.dim)
def min_dim(x, dim, keepdim=False):
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    return jnp.min(x, axis=dim, keepdims=keepdim), jnp.argmin(x, axis=dim, keepdims=keepdim)
