"""A layer's joint graph in two: the forward pass with what it saves, and the backward pass that reads it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from torch_shard._common.fx import (
    COPIES,
    DIM_VIEWS,
    FILLS,
    PRODUCTS,
    RESHAPES,
    aten_name,
    depending_on,
    has_effect,
    is_random,
    operator_name,
    outputs_of,
)


def _is_product(node: Node) -> bool:
    name = operator_name(node)
    return name in PRODUCTS or "attention" in name or name in ("grouped_mm", "recurrence", "layer")


SAVED: dict[str, Callable[[Node], bool]] = {
    "dots": _is_product,
    "block": lambda node: False,
}
"""For each kind of rematerialisation, which results of the forward pass may be saved for the backward pass.

With "none" it is those that `min_cut_residuals` chooses."""


@dataclasses.dataclass(frozen=True)
class Halves:
    """The two passes of one layer.

    Attributes:
        forward: `(*inputs) -> (*results, *new values of written inputs, *saved values, *saved inputs)`.
        backward: `(*inputs at hand, *saved values, *saved inputs, *cotangents) -> gradients`; None if there are none.
        at_hand: Numbers of the inputs that the backward pass takes from where the forward pass took them.
        num_saved: How many values and inputs are saved.
    """

    forward: GraphModule
    backward: GraphModule | None
    at_hand: tuple[int, ...]
    num_saved: int


def partition(
    joint: GraphModule,
    is_cotangent: list[bool],
    *,
    num_results: int,
    num_outputs: int,
    remat: str,
    at_hand: Collection[int],
) -> Halves:
    """Split a joint graph.

    Args:
        joint: `(*inputs and cotangents) -> (*results, *gradients, *new values of written inputs)`.
        is_cotangent: For each input.
        num_results: Results of the forward pass come first.
        num_outputs: Results and gradients.
        remat: Which values are saved, "none" or a key of `SAVED`; the others are computed again.
        at_hand: Numbers of the inputs that the backward pass can read without their being saved.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    cotangents = list(itertools.compress(placeholders, is_cotangent))
    inputs = [n for n in placeholders if n not in cotangents]
    outputs = outputs_of(joint.graph)
    grads = outputs[num_results:num_outputs]
    if remat == "none":
        saved = min_cut_residuals(grads, set(cotangents), {inputs[number] for number in at_hand})
    else:
        saved = _saved(grads, set(cotangents), SAVED[remat])
    there = tuple(number for number, n in enumerate(inputs) if n in saved and number in at_hand)
    kept = [n for n in joint.graph.nodes if n in saved and n.op != "placeholder"]
    kept += [n for number, n in enumerate(inputs) if n in saved and number not in at_hand]
    done = {n for n in joint.graph.nodes if has_effect(n)} - depending_on(cotangents)  # by the forward pass
    read = [*(inputs[number] for number in there), *kept, *cotangents]
    return Halves(
        forward=_extract(joint, inputs, [*outputs[:num_results], *outputs[num_outputs:], *kept]),
        backward=_extract(joint, read, grads, done) if grads else None,
        at_hand=there,
        num_saved=len(kept),
    )


def _saved(grads: Sequence[object], cotangents: set[Node], may_save: Callable[[Node], bool]) -> set[Node]:
    """Values that the backward pass must be given: those of the forward pass that may be saved, and inputs."""
    behind = depending_on(cotangents)
    saved: set[Node] = set()
    seen: set[Node] = set()
    todo = [n for n in grads if isinstance(n, Node)]
    while todo:
        node = todo.pop()
        if node in seen or node in cotangents:
            continue
        seen.add(node)
        if node not in behind and (node.op == "placeholder" or _is_saved(node, may_save)):
            saved.add(node)
        else:
            todo.extend(node.all_input_nodes)
    return saved


def _is_saved(node: Node, may_save: Callable[[Node], bool]) -> bool:
    """Only tensors can be saved: of an operator with several results, the ones that are read."""
    if getattr(node.target, "__name__", "") == "getitem":
        source = node.all_input_nodes[0]
        return not isinstance(source.meta.get("val"), torch.Tensor) and may_save(source)
    return isinstance(node.meta.get("val"), torch.Tensor) and may_save(node)


def _extract(
    joint: GraphModule, inputs: list[Node], outputs: Sequence[Argument], without: Collection[Node] = ()
) -> GraphModule:
    """The part of a graph that computes `outputs` from `inputs`, but not some nodes that nothing depends on."""
    graph, copied = Graph(), {}
    for node in inputs:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node in without:
            continue
        known = all(source in copied for source in node.all_input_nodes)
        if node not in copied and node.op in ("call_function", "get_attr") and known:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output([copied[n] if isinstance(n, Node) else n for n in outputs])
    module = GraphModule(joint, graph)
    module.graph.eliminate_dead_code()
    return module


_AGAIN = COPIES | DIM_VIEWS | FILLS | {"arange", "_to_copy"}


def min_cut_residuals(grads: Sequence[object], cotangents: Collection[Node], at_hand: Collection[Node]) -> set[Node]:
    """The fewest bytes of the forward pass from which the rest is computed again elementwise, inputs among them.

    It is a minimum cut. Values flow from what is there once the forward pass has run (inputs, and results of all but
    elementwise operators and views) to what the backward pass reads, and each value may be cut at the price of its
    bytes: of a cast the narrow side, of a chain of elementwise operators whichever of its values is smallest. Source:
    the min-cut partitioner of functorch (He and Yu, "Transcending runtime-memory tradeoffs", MLSys 2023).
    """
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
