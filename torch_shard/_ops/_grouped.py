"""Products of groups: one matrix per group of rows, columns or summands (mixtures of experts)."""

import jax
import jax.numpy as jnp
import torch

from torch_shard import _kernels  # noqa: F401  (defines the operator)
from torch_shard._common.dtypes import jax_dtype
from torch_shard._ops._registry import lowers

# The ragged dim is the summed one: (M, K), (K, N) -> (G, M, N), as in the gradient of the groups' matrices.
_SUMMED = jax.lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])


@lowers(torch.ops.torch_shard.grouped_mm.default)
def grouped_mm(x, y, offs, dtype):
    """Group `i` is `offs[i - 1]:offs[i]` of the dim that two matrices leave ragged; both batched is a plain bmm.

    What lies behind the last group is zero; torch leaves it as it finds it.
    """
    dtype = jax_dtype(dtype)
    if offs is None:
        return jnp.matmul(x, y, preferred_element_type=dtype)
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    if x.ndim == 2 and y.ndim == 2:
        return jax.lax.ragged_dot_general(x, y, sizes, _SUMMED, preferred_element_type=dtype)
    if x.ndim == 2:
        return jax.lax.ragged_dot(x, y, sizes, preferred_element_type=dtype)
    return jax.lax.ragged_dot(y.T, jnp.swapaxes(x, 1, 2), sizes, preferred_element_type=dtype).T
