"""Products of groups: one matrix per group of rows, columns or summands (mixtures of experts)."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.overrides import captured_op, instead_of, instead_of_operator
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten

_FUNCTION: Any = vars(torch)["_grouped_mm"]  # behind torch.nn.functional.grouped_mm


@captured_op("torch_shard::grouped_mm", "(Tensor x, Tensor y, Tensor? offs, ScalarType dtype) -> Tensor")
def _grouped_shape(x, y, offs, dtype):
    groups = () if offs is None or (x.ndim, y.ndim) != (2, 2) else (len(offs),)
    batch = (len(x),) if x.ndim == y.ndim == 3 else ()
    return torch.empty((*groups, *batch, x.shape[-2], y.shape[-1]), dtype=dtype, device="cpu")


@instead_of_operator(aten._grouped_mm.default)
def grouped_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`aten._grouped_mm`, whose own shape rule takes nothing but bfloat16."""
    if bias is not None:
        raise NotImplementedError("grouped_mm with a bias, which PyTorch's own kernels refuse too: add it after.")
    if (offs is None) != (x.ndim == y.ndim == 3):
        raise ValueError(
            f"grouped_mm takes offs exactly where an operand has two dims; got shapes {tuple(x.shape)} and "
            f"{tuple(y.shape)} {'without' if offs is None else 'with'} offs."
        )
    return torch.ops.torch_shard.grouped_mm(x, y, offs, out_dtype or x.dtype)


@instead_of(_FUNCTION)
def grouped_mm_of_autocast(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **others: Any) -> torch.Tensor:
    """A product like others for autocast, which PyTorch's own lists have forgotten."""
    if torch.is_autocast_enabled("cpu"):
        mat_a, mat_b = (each.to(torch.get_autocast_dtype("cpu")) for each in (mat_a, mat_b))
    return _FUNCTION(mat_a, mat_b, *args, **others)


# The ragged dim is the summed one: (M, K), (K, N) -> (G, M, N), as in the gradient of the groups' matrices.
_SUMMED = jax.lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])


@lowers(torch.ops.torch_shard.grouped_mm.default)
def lower_grouped_mm(x, y, offs, dtype):
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
