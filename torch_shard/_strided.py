"""`as_strided` reads the memory of a tensor, and a JAX array is no memory: let it read a tensor laid out in order."""

import torch
from torch.fx import GraphModule, Node

from torch_shard._common.fx import args_of

aten = torch.ops.aten


def stride_in_order(graph: GraphModule) -> None:
    """Rewrite `graph`, not yet functional, in place; values and aliases stay the same.

    Each `as_strided` then has an operand whose elements lie in memory one after the other, in the order of its indices.

    Raises:
        NotImplementedError: The memory belongs to no tensor of the graph as a whole.
    """
    for node in [n for n in graph.graph.nodes if n.target is aten.as_strided.default]:
        source, size, stride, *rest = args_of(node)
        offset = rest[0] if rest and rest[0] is not None else source.meta["val"].storage_offset()
        node.args = (_in_order(node, source), size, stride, offset)
    graph.recompile()


def _in_order(node: Node, source: Node) -> Node:
    """The tensor that `source` is a view of, its dims in the order of their strides."""
    storage = source.meta["val"].untyped_storage()
    whole = source
    while (order := _order(whole.meta["val"])) is None:
        parent = whole.args[0] if whole.op == "call_function" and whole.args else None
        if not isinstance(parent, Node) or parent.meta["val"].untyped_storage()._cdata != storage._cdata:
            raise NotImplementedError(
                f"as_strided of a tensor with strides {source.meta['val'].stride()}, whose memory a compiled program "
                "cannot reconstruct. Call .contiguous() before it, or index instead."
            )
        whole = parent
    if order == list(range(len(order))):
        return whole
    with node.graph.inserting_before(node):
        return node.graph.call_function(aten.permute.default, (whole, order))


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dims in which `tensor` fills its storage from start to end; None if it does not fill it."""
    num_bytes = tensor.numel() * tensor.element_size()
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))
    fills = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes
    return order if fills and tensor.permute(order).is_contiguous() else None
