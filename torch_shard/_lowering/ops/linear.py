"""Products and views: the batch dims of a product stay apart, as a partitioner wants them."""

import jax.numpy as jnp
import torch

from torch_shard._common.overrides import captured_op
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
