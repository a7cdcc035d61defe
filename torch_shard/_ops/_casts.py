"""Conversions and running totals, in the dtypes in which torch computes them."""

import jax.numpy as jnp
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._ops._registry import foreign_lowering, lowers

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


@lowers(aten.cumsum.default)
def cumsum(x, dim, *, dtype=None):
    x = x.astype(_total_dtype(x, dtype))
    return jnp.cumsum(x, axis=dim) if x.ndim else x


@lowers(aten.cumprod.default)
def cumprod(x, dim, *, dtype=None):
    x = x.astype(_total_dtype(x, dtype))
    return jnp.cumprod(x, axis=dim) if x.ndim else x


@lowers(aten.add.Tensor)
def add(x, y, *, alpha=1):
    if jnp.result_type(x) == jnp.result_type(y) == jnp.bool_:
        return jnp.logical_or(x, jnp.logical_and(y, bool(alpha)))
    return foreign_lowering(aten.add.Tensor)(x, y, alpha=alpha)  # pyright: ignore[reportOptionalCall]
