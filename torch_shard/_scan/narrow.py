"""Gradients in the precision that they were computed in: a loop stacks those, and one cast of the stack follows it.

Under `compute_dtype` the last that a layer's backward pass does is to cast the gradients of its weights to float32. In
a loop that would be a stack of twice the bytes, written and read once more.
"""

import dataclasses
from typing import Any

import jax
import torch
from torch.fx import GraphModule, Node

from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.fx import args_of, outputs_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Narrow:
    """A value, and the wider dtype that it is of for all who read it.

    Attributes:
        array: In which it is held.
        dtype: That it is of.
    """

    array: Any
    dtype: Any = dataclasses.field(metadata={"static": True})


def wide(value: Any) -> Any:
    """A value in its own dtype."""
    return value.array.astype(value.dtype) if isinstance(value, Narrow) else value


def take_casts_off(graph: GraphModule) -> dict[int, Any]:
    """Let a graph give what it casts last to a wider dtype as it was before; returns the dtypes by number of output."""
    found, outputs = dict[int, Any](), outputs_of(graph.graph)
    for number, node in enumerate(outputs):
        if isinstance(node, Node) and _widens(node):
            found[number], outputs[number] = jax_dtype(node.meta["val"].dtype), args_of(node)[0]
    graph.graph.output_node().args = (tuple(outputs),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return found


def _widens(node: Node) -> bool:
    """Tell whether a node does nothing but cast a floating-point number to a wider one, exactly."""
    if node.target is not torch.ops.aten._to_copy.default or "memory_format" in node.kwargs:
        return False
    before, after = (x.meta["val"].dtype for x in (args_of(node)[0], node))
    if not before.is_floating_point or not after.is_floating_point or before == after:
        return False
    return torch.promote_types(before, after) == after
