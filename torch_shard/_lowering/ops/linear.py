"""Products and views: the batch dims of a product stay apart, as a partitioner wants them."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.overrides import captured_op, instead_of, instead_of_operator
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten


for _op, _fn in {
    **dict.fromkeys((aten.mm, aten.bmm, aten.matmul, aten.mv, aten.dot), jnp.matmul),
    aten.permute: jnp.transpose,
    aten.t: jnp.transpose,
    aten.unsqueeze: jnp.expand_dims,
}.items():
    lowers(_op.default)(_fn)


@lowers(aten.tensordot.default)
def tensordot(x, y, dims_x, dims_y):
    return jnp.tensordot(x, y, (tuple(dims_x), tuple(dims_y)))


@captured_op("torch_shard::einsum", "(Tensor x, Tensor y, str equation) -> Tensor")
def _einsum_shape(x, y, equation):
    return torch.einsum(equation, x, y)


@lowers(torch.ops.torch_shard.einsum.default)
def einsum(x, y, equation):
    return jnp.einsum(equation, x, y)


@lowers(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def addmm(bias, x, y, *, beta=1, alpha=1):
    product = jnp.matmul(x, y)
    if jnp.issubdtype(product.dtype, jnp.integer):
        alpha, beta = int(alpha), int(beta)  # as torch does
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else beta * bias)


@lowers(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def view(x, shape, *_):
    return jnp.reshape(x, tuple(shape))


@lowers(aten.transpose.int)
def transpose(x, dim0, dim1):
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers(aten.expand.default)
def expand(x, shape, *, implicit=False):
    added = len(shape) - x.ndim
    kept = [x.shape[i - added] if size == -1 else size for i, size in enumerate(shape)]
    return jnp.broadcast_to(x, kept)


@lowers(aten.slice.Tensor)
def slice_tensor(x, dim=0, start=None, end=None, step=1):
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@lowers(aten.select.int)
def select(x, dim, index):
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


@lowers(aten.cat.default)
def cat(tensors, dim=0):
    kept = [x for x in tensors if x.shape != (0,)] or tensors[:1]  # torch skips empty 1-D tensors
    return jnp.concatenate(kept, axis=dim)


@lowers(aten.split_with_sizes.default)
def split_with_sizes(x, sizes, dim=0):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_tensor(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@lowers(aten.split.Tensor)
def split(x, size, dim=0):
    length = x.shape[dim]
    return [slice_tensor(x, dim, start, start + size) for start in range(0, max(length, 1), max(size, 1))]


@lowers(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def same(x, **_):
    return x


# Products of groups: one matrix per group of rows, columns or summands (mixtures of experts).


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
