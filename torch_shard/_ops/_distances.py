"""Gradients of pairwise distances, with PyTorch's choice of subgradient: zero where points coincide."""

import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._ops._registry import lowers

aten = torch.ops.aten


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


@lowers(aten._pdist_forward.default)
def pdist_forward(x, p=2.0):
    first, second = np.triu_indices(x.shape[0], 1)
    size = jnp.abs(x[first] - x[second])
    if p == 0:
        return jnp.sum(size != 0, -1).astype(x.dtype)
    if p == jnp.inf:
        return jnp.max(size, -1, initial=0)
    return jnp.sqrt(jnp.sum(size * size, -1)) if p == 2 else jnp.sum(size**p, -1) ** (1 / p)


@lowers(aten._pdist_backward.default)
def pdist_backward(grad, x, p, pdist):
    first, second = np.triu_indices(x.shape[0], 1)
    per_pair = _distance_gradient(grad[:, None], x[first] - x[second], pdist[:, None], p)
    return jnp.zeros_like(x).at[first].add(per_pair).at[second].add(-per_pair)
