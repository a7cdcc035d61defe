"""Sums of products in half precision are summed before they are rounded, as one product of more summands would be.

The gradient of a value that several layers read (queries, keys and values; gate and up) is such a sum. Where each
product is a sum over devices too, XLA then sums once over the devices, not once for each product.
"""

import jax.numpy as jnp
import torch
from torch.fx import Node

from torch_shard._common.fx import args_of, aten_name, dtype_of, new_before, shape_of, target_of
from torch_shard._common.operator_families import RESHAPES
from torch_shard._common.overrides import rewrites
from torch_shard._lowering.ops.registry import lowers

aten, ours = torch.ops.aten, torch.ops.torch_shard


@torch.library.custom_op("torch_shard::matmul", mutates_args=())
def _matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_matmul.register_fake
def _product_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, y).float()


@lowers(ours.matmul.default)
def matmul(x, y):
    """The product of two arrays in half precision, in float32."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


@rewrites(aten.add.Tensor)
def _sum_before_rounding(node: Node) -> Node | None:
    summands, dtype = args_of(node), dtype_of(node)
    if node.kwargs or dtype not in (torch.bfloat16, torch.float16) or len(summands) != 2:
        return None
    if not all(isinstance(x, Node) and shape_of(x) == shape_of(node) and _can_widen(x, dtype) for x in summands):
        return None
    wide = [_widened(x, node) for x in summands]
    total = new_before(node, aten.add.Tensor, tuple(wide), node.meta["val"].float())
    found = new_before(node, aten._to_copy.default, (total,), node.meta["val"])
    found.kwargs = {"dtype": dtype}
    return found


def _can_widen(node: Node, dtype: torch.dtype) -> bool:
    """Tell whether a value that nothing else reads is a product of this dtype, or a sum that was not rounded before."""
    readers = [user for user in node.users if user.users or user.op == "output"]  # the others are about to go
    if len(readers) != 1 or dtype_of(node) != dtype:
        return False
    if node.target in RESHAPES:
        return _can_widen(args_of(node)[0], dtype)
    is_sum = node.target is aten._to_copy.default and args_of(node)[0].target is aten.add.Tensor
    return (is_sum and dtype_of(args_of(node)[0]) is torch.float32) or aten_name(node) in ("mm", "bmm", "matmul")


def _widened(node: Node, at: Node) -> Node:
    """The same in float32."""
    if node.target is aten._to_copy.default:
        return args_of(node)[0]
    value = node.meta["val"].float()
    if node.target in RESHAPES:
        return new_before(at, target_of(node), (_widened(args_of(node)[0], at), *args_of(node)[1:]), value)
    found = new_before(node, ours.matmul.default, args_of(node)[:2], value)
    found.meta = {**node.meta, "val": value}
    return found
