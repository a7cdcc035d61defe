"""A layer's joint graph in two: the forward pass with what it saves, and the backward pass that reads it."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from torch_shard._common.fx import depending_on, has_effect, operator_name, outputs_of
from torch_shard._common.operator_families import PRODUCTS
from torch_shard._scan.min_cut_residuals import min_cut_residuals


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
        forward: `(*inputs) -> (*results, *new values of written inputs, *saved values)`.
        backward: `(*saved inputs, *saved values, *cotangents) -> gradients`; None if there are none.
        inputs: Numbers of the inputs that the backward pass reads, cotangents not counted.
        num_saved: How many values are saved.
    """

    forward: GraphModule
    backward: GraphModule | None
    inputs: tuple[int, ...]
    num_saved: int


def partition(
    joint: GraphModule,
    is_cotangent: list[bool],
    *,
    num_results: int,
    num_outputs: int,
    remat: str,
    at_hand: Collection[int] = (),
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
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    cotangents = [n for n, is_one in zip(placeholders, is_cotangent, strict=True) if is_one]
    inputs = [n for n, is_one in zip(placeholders, is_cotangent, strict=True) if not is_one]
    outputs = outputs_of(joint.graph)
    grads = outputs[num_results:num_outputs]
    if remat == "none":
        saved = min_cut_residuals(grads, set(cotangents), {inputs[number] for number in at_hand})
    else:
        saved = _saved(grads, set(cotangents), SAVED[remat])
    values = [n for n in joint.graph.nodes if n in saved and n.op != "placeholder"]
    results = [*outputs[:num_results], *outputs[num_outputs:], *values]
    read = [n for n in inputs if n in saved]
    done = {n for n in joint.graph.nodes if has_effect(n)} - depending_on(cotangents)  # by the forward pass
    return Halves(
        forward=_extract(joint, inputs, results),
        backward=_extract(joint, [*read, *values, *cotangents], grads, done) if grads else None,
        inputs=tuple(inputs.index(n) for n in read),
        num_saved=len(values),
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
