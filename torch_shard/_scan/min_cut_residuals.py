"""What a layer best saves for its backward pass: the fewest bytes from which the rest is computed again elementwise.

It is a minimum cut. Values flow from what is there once the forward pass has run (inputs, and results of all but
elementwise operators and views) to what the backward pass reads, and each value may be cut at the price of its bytes:
of a cast the narrow side, of a chain of elementwise operators whichever of its values is smallest. Source: the min-cut
partitioner of functorch (He and Yu, "Transcending runtime-memory tradeoffs", MLSys 2023).
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from torch_shard._common.fx import aten_name, depending_on, is_random
from torch_shard._common.operator_families import COPIES, DIM_VIEWS, FILLS, RESHAPES

_AGAIN = COPIES | DIM_VIEWS | FILLS | {"arange", "_to_copy"}


def min_cut_residuals(grads: Sequence[object], cotangents: Collection[Node], at_hand: Collection[Node]) -> set[Node]:
    """Values of the forward pass that are enough for the backward pass, inputs among them."""
    behind = depending_on(cotangents)
    forward, read = _needed(grads, behind)
    import networkx  # which takes a while

    flow = networkx.DiGraph()
    for node in forward:
        flow.add_edge((node, "in"), (node, "out"), capacity=0 if node in at_hand else _num_bytes(node))
        for source in () if _is_there(node) else node.all_input_nodes:
            flow.add_edge((source, "out"), (node, "in"), capacity=math.inf)
        if _is_there(node):
            flow.add_edge("there", (node, "in"), capacity=math.inf)
        if node in read:
            flow.add_edge((node, "out"), "read", capacity=math.inf)
    if "there" not in flow or "read" not in flow:
        return set()
    _, (before, after) = networkx.minimum_cut(flow, "there", "read")
    return {node for node in forward if (node, "in") in before and (node, "out") in after}


def _needed(grads: Sequence[object], behind: Collection[Node]) -> tuple[list[Node], set[Node]]:
    """The values of the forward pass that gradients come from, and those that the backward pass itself reads."""
    forward, read, seen = list[Node](), set[Node](), set[Node]()
    todo = [node for node in grads if isinstance(node, Node)]
    read |= {node for node in todo if node not in behind}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in behind:
            forward.append(node)
        else:
            read |= {source for source in node.all_input_nodes if source not in behind}
        todo.extend(node.all_input_nodes)
    return forward, read


def _is_there(node: Node) -> bool:
    """Tell whether a value is not computed again: inputs, and all that is more than elementwise."""
    if node.op != "call_function":
        return node.op == "placeholder"
    if getattr(node.target, "__name__", "") == "getitem" or node.target in RESHAPES or aten_name(node) in _AGAIN:
        return False
    return is_random(node) or torch.Tag.pointwise not in getattr(node.target, "tags", ())


def _num_bytes(node: Node) -> float:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else math.inf
