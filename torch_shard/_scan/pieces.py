"""Which inputs and gradients of a capture, and of its repeated layers, are in pieces: by the names of entries."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node

from torch_shard._capture import Captured
from torch_shard._common.fx import args_of, outputs_of
from torch_shard._lowering import mark_pieces
from torch_shard._scan.bundles import GraphInput
from torch_shard._scan.region import LAYER, Call

Cut = tuple[int, int]
"""Number of pieces, and the dim from the end."""


def note_pieces(captured: Captured[Any], cuts: Mapping[str, Cut], calls: Mapping[int, Call]) -> None:
    """Let the graphs of a loss keep apart what is kept in pieces.

    Args:
        captured: The loss, with inputs and gradients by name.
        cuts: What is in pieces, by name.
        calls: Of its repeated layers.
    """
    if not cuts:
        return
    graph, named, trained = captured.module.graph, captured.aux.inputs, captured.aux.grads
    inputs = dict(zip((node for node in graph.nodes if node.op == "placeholder"), named, strict=False))
    grads = zip(outputs_of(graph)[1:], trained, strict=False)
    mark_pieces(
        graph,
        {node: cuts[name] for node, name in inputs.items() if name in cuts},
        [(node, cuts[name]) for node, name in grads if name in cuts and isinstance(node, Node)],
    )
    for node in graph.nodes:
        if node.target is LAYER:
            number, tensors = args_of(node)
            _note_layer(calls[number], [inputs.get(tensor) for tensor in tensors], cuts)


def _note_layer(call: Call, arguments: Sequence[GraphInput | None], cuts: Mapping[str, Cut]) -> None:
    region, graph = call.region, call.region.graph.module.graph
    names = [_name(arguments[i], member) for i, member in call.arguments]
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = [node for node, (kind, _) in zip(nodes, region.inputs, strict=True) if kind != "cotangent"]
    grads = outputs_of(graph)[region.num_results : region.graph.num_outputs]
    pairs = zip(grads, (names[position] for position in region.gradients), strict=True)
    mark_pieces(
        graph,
        {node: cuts[name] for node, name in zip(tensors, names, strict=True) if name in cuts},
        [(node, cuts[name]) for node, name in pairs if name in cuts and isinstance(node, Node)],
    )


def _name(given: GraphInput | None, member: int | None) -> str:
    """The name of an argument of a layer; empty for what is no entry."""
    if given is None or isinstance(given, str):
        return given or ""
    return "" if member is None else given.names[member]
