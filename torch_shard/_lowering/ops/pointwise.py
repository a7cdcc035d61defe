"""Conversions and running totals, in the dtypes in which torch computes them."""

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._lowering.ops.registry import foreign_lowering, in_float32, lowers

aten = torch.ops.aten


def _is_short(dtype):
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize < 4


@lowers(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_):
    if dtype is None:
        return x
    target = jax_dtype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating):
        x = x != 0 if target == jnp.bool_ else jnp.real(x)
    if _is_short(target) and jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.int32)  # torch wraps around, where JAX would stop at the largest value
    return x.astype(target)


def _total_dtype(x, dtype):
    is_whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    return jax_dtype(dtype) if dtype is not None else jax_dtype(torch.int64) if is_whole else x.dtype


@lowers(aten.mean.default)
def mean(x, *, dtype=None):
    return jnp.mean(x if dtype is None else x.astype(jax_dtype(dtype)))


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x, dim):
    return in_float32(jax.lax.cumlogsumexp)(x, axis=dim % x.ndim) if x.ndim else x


@lowers(aten.cumsum.default)
def cumsum(x, dim, *, dtype=None):
    x = x.astype(_total_dtype(x, dtype))
    return in_float32(jnp.cumsum)(x, axis=dim) if x.ndim else x


@lowers(aten.cumprod.default)
def cumprod(x, dim, *, dtype=None):
    x = x.astype(_total_dtype(x, dtype))
    return jnp.cumprod(x, axis=dim) if x.ndim else x


@lowers(aten.add.Tensor)
def add(x, y, *, alpha=1):
    if jnp.result_type(x) == jnp.result_type(y) == jnp.bool_:
        return jnp.logical_or(x, jnp.logical_and(y, bool(alpha)))
    return foreign_lowering(aten.add.Tensor)(x, y, alpha=alpha)  # pyright: ignore[reportOptionalCall]


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


lowers(aten.fmod.Tensor, aten.fmod.Scalar)(jnp.fmod)  # the remainder that has the sign of the first


def _along(best, place):
    """Returns `(values, indices)`; a NaN wins, and of equals the first."""

    def lowered(x, dim, keepdim=False):
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int32)
        return best(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim)

    return lowered


lowers(aten.max.dim)(_along(jnp.max, jnp.argmax))
lowers(aten.min.dim)(_along(jnp.min, jnp.argmin))
