"""The gradient of a matrix that is embedding and head at once: summed on each device, and then once over the devices.

XLA's partitioner sums each of its two parts over the devices as soon as it is made, and each is as large as the matrix.
What a device adds up in float32 is made some features at a time, so that it never holds a matrix that wide.
"""

import math

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node

from torch_shard._common.fx import args_of, dtype_of, new_before, shape_of
from torch_shard._common.overrides import captured_op, rewrites
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import RowSplit

aten, ours = torch.ops.aten, torch.ops.torch_shard

_LARGEST_PART = 80 << 20
"""Bytes of the whole matrix in float32 that are worth a part of its own."""


@captured_op(
    "torch_shard::tied_gradient",
    "(Tensor grad_logits, Tensor hidden, Tensor grad_rows, Tensor ids, SymInt padding_idx) -> Tensor",
)
def _shape_of_matrix(grad_logits, hidden, grad_rows, *_):
    return grad_rows.new_empty(grad_logits.shape[-1], hidden.shape[-1])


@rewrites(aten.add.Tensor)
def _sum_at_once(node: Node) -> Node | None:
    """A product over all rows, and what an embedding adds up of rows."""
    if node.kwargs or len(args_of(node)) != 2 or not all(isinstance(part, Node) for part in args_of(node)):
        return None
    product, rows = sorted(args_of(node), key=lambda part: part.target is aten.embedding_dense_backward.default)
    if rows.target is not aten.embedding_dense_backward.default or args_of(rows)[4]:
        return None
    grad_rows, ids, _, padding_idx, _ = args_of(rows)
    product = args_of(product)[0] if product.target is aten._to_copy.default else product
    if product.target is not aten.tensordot.default or not dtype_of(node) is dtype_of(grad_rows) is torch.float32:
        return None
    grad_logits, hidden, *dims = args_of(product)
    leading = list(range(len(shape_of(hidden)) - 1))
    if dims != [leading, leading] or len({shape_of(x)[0] for x in (hidden, grad_rows, ids)}) != 1:
        return None
    return new_before(
        node, ours.tied_gradient.default, (grad_logits, hidden, grad_rows, ids, padding_idx), node.meta["val"]
    )


def untie_gradients(module: torch.fx.GraphModule) -> None:
    """Make of each such gradient the sum of its two parts again, in a graph that makes them at different times."""
    for node in list(module.graph.nodes):
        if node.target is not ours.tied_gradient.default:
            continue
        grad_logits, hidden, grad_rows, ids, padding_idx = args_of(node)
        value, dims = node.meta["val"], list(range(len(shape_of(hidden)) - 1))
        narrow = torch.empty(value.shape, dtype=dtype_of(hidden), device="meta")
        product = new_before(node, aten.tensordot.default, (grad_logits, hidden, dims, dims), narrow)
        product = new_before(node, aten._to_copy.default, (product,), value)
        product.kwargs = {"dtype": value.dtype}
        given = (grad_rows, ids, value.shape[0], padding_idx, False)
        rows = new_before(node, aten.embedding_dense_backward.default, given, value)
        node.replace_all_uses_with(new_before(node, aten.add.Tensor, (product, rows), value))
        module.graph.erase_node(node)


@lowers(ours.tied_gradient.default, on_mesh=True)
def tied_gradient(grad_logits, hidden, grad_rows, ids, padding_idx, *, split=None):
    """Sum of `grad_logits[i, v] * hidden[i, d]` over rows i, and of `grad_rows[i, d]` over those with `ids[i] == v`.

    Over devices in the dtype of the product, as every gradient of a weight is; within one in float32.
    """
    dtype = jnp.result_type(grad_logits, hidden)

    def local(grad_logits, hidden, grad_rows, ids):
        dims = tuple(range(hidden.ndim - 1))
        product = jnp.tensordot(grad_logits, hidden, (dims, dims)).astype(grad_rows.dtype)
        taken = jnp.where((ids == padding_idx)[..., None], 0, grad_rows)
        return product.at[ids.reshape(-1)].add(taken.reshape(-1, taken.shape[-1]))

    def narrow(grad_logits, hidden, grad_rows, ids):
        """The same in the dtype of the product."""
        num = _num_parts(grad_logits.shape[-1], hidden.shape[-1])
        parts = zip(jnp.split(hidden, num, -1), jnp.split(grad_rows, num, -1), strict=True)
        return jnp.concatenate([local(grad_logits, x, rows, ids).astype(dtype) for x, rows in parts], -1)

    given = (grad_logits, hidden, grad_rows, ids)
    cuts = [] if split is None else _cuts(split, ids.shape, hidden.ndim)
    if split is None or math.prod(num for num, _ in cuts) == 1:
        return local(*given)

    one = narrow
    for _ in cuts:
        one = jax.vmap(one)
    parts = _on_shards(one(*(_by_shard(x, cuts, split) for x in given)), cuts, split)
    return jnp.sum(parts, tuple(range(len(cuts))), dtype=parts.dtype).astype(grad_rows.dtype)


def _cuts(rows: RowSplit, shape: tuple[int, ...], ndim: int) -> list[tuple[int, tuple[str, ...]]]:
    """Into how many parts rows are cut, and their sequence, if it is split too; and over which axes."""
    if shape[0] % rows.num_shards:
        return []
    cuts = [(rows.num_shards, rows.axes)]
    if rows.context is not None and len(shape) == 2 and ndim == 3:
        num = rows.mesh.shape[rows.context.axis]
        cuts += [(num, (rows.context.axis,))] if shape[1] % num == 0 else []
    return cuts


def _num_parts(num_words: int, num_features: int) -> int:
    """At most eight, each a multiple of the 128 lanes of a TPU: every part reads all gradients of logits."""
    blocks, rest = divmod(num_features, 128)
    most = min(8, -(-4 * num_words * num_features // _LARGEST_PART))
    return 1 if rest else max(num for num in range(1, 1 + most) if blocks % num == 0)


def _by_shard(x: jax.Array, cuts: list[tuple[int, tuple[str, ...]]], rows: RowSplit) -> jax.Array:
    """The parts first, in as many dims as are cut."""
    sizes = [size for (num, _), whole in zip(cuts, x.shape, strict=False) for size in (num, whole // num)]
    x = x.reshape(*sizes, *x.shape[len(cuts) :])
    return _on_shards(jnp.moveaxis(x, range(0, 2 * len(cuts), 2), range(len(cuts))), cuts, rows)


def _on_shards(x: jax.Array, cuts: list[tuple[int, tuple[str, ...]]], rows: RowSplit) -> jax.Array:
    """Each on its own shard; the compiler chooses for the other dims."""
    return jax.lax.with_sharding_constraint(x, rows.along({dim: axes for dim, (_, axes) in enumerate(cuts)}, x.ndim))
