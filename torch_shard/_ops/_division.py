"""Division with a rounding mode."""

import jax
import jax.numpy as jnp
import torch

from torch_shard._ops._registry import lowers

aten = torch.ops.aten


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(x, y, *, rounding_mode=None):
    x, y = jnp.asarray(x), jnp.asarray(y)
    dtype = jnp.result_type(x, y)
    if rounding_mode is None or jnp.issubdtype(dtype, jnp.inexact):
        quotient = jnp.true_divide(x, y)
        return quotient if rounding_mode is None else _round(x, y, quotient, rounding_mode)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    x, y = jnp.broadcast_arrays(x.astype(dtype), y.astype(dtype))
    return jax.lax.div(x, y)


def _round(x, y, quotient, mode):
    """Floor as Python does it: `x - y * floor` is the remainder. A zero divisor gives what it gives unrounded."""
    if mode == "trunc":
        return jnp.trunc(quotient)
    return jnp.where(y == 0, quotient, jnp.floor_divide(x, jnp.where(y == 0, 1, y)))
