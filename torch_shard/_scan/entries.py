"""What a plan says of the inputs and gradients of a capture, and of its repeated layers, by the names of entries."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec
from torch.fx import Graph, Node

from torch_shard._capture import Captured
from torch_shard._common.fx import args_of, outputs_of
from torch_shard._lowering import USED_AS, mark_pieces
from torch_shard._scan.bundles import GraphInput
from torch_shard._scan.region import LAYER, Call

Cut = tuple[int, int]
"""Number of pieces, and the dim from the end."""


@dataclasses.dataclass(frozen=True)
class EntryNotes:
    """What the lowering is to know of entries of the model.

    Attributes:
        cuts: Which are kept in how many pieces, along which dim from the end.
        uses: How some are split where they are used.
    """

    cuts: Mapping[str, Cut]
    uses: Mapping[str, PartitionSpec]

    def put(self, captured: Captured[Any], calls: Mapping[int, Call]) -> None:
        """Note it on the nodes of a loss, and of its layers."""
        if not self.cuts and not self.uses:
            return
        graph, named, trained = captured.module.graph, captured.aux.inputs, captured.aux.grads
        given = dict(zip((node for node in graph.nodes if node.op == "placeholder"), named, strict=False))
        inputs = {node: name for node, name in given.items() if isinstance(name, str)}
        self._mark(graph, inputs, zip(outputs_of(graph)[1:], trained, strict=False))
        for node in graph.nodes:
            if node.target is LAYER:
                number, tensors = args_of(node)
                self._put_on_layer(calls[number], [given.get(tensor) for tensor in tensors])

    def _put_on_layer(self, call: Call, arguments: Sequence[GraphInput | None]) -> None:
        region, graph = call.region, call.region.graph.module.graph
        names = [_name(arguments[i], member) for i, member in call.arguments]
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        tensors = [node for node, (kind, _) in zip(nodes, region.inputs, strict=True) if kind != "cotangent"]
        grads = outputs_of(graph)[region.num_results : region.graph.num_outputs]
        trained = (names[position] for position in region.gradients)
        self._mark(graph, dict(zip(tensors, names, strict=True)), zip(grads, trained, strict=True))

    def _mark(self, graph: Graph, inputs: Mapping[Node, str], grads: Iterable[tuple[Any, Any]]) -> None:
        if self.cuts:
            cuts = {node: self.cuts[name] for node, name in inputs.items() if name in self.cuts}
            named = [(node, name) for node, name in grads if isinstance(node, Node) and isinstance(name, str)]
            mark_pieces(graph, cuts, [(node, self.cuts.get(name)) for node, name in named])
        for node, name in inputs.items():
            if name in self.uses:
                node.meta[USED_AS] = self.uses[name]


def _name(given: GraphInput | None, member: int | None) -> str:
    """The name of an argument of a layer; empty for what is not an entry."""
    if given is None or isinstance(given, str):
        return given or ""
    return "" if member is None else given.names[member]
