"""What a plan says of the inputs and gradients of a capture, and of its repeated layers, by the names of entries."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec
from torch.fx import Graph, Node

from torch_shard._capture import Captured
from torch_shard._common.fx import args_of, shape_of
from torch_shard._lowering import USED_AS
from torch_shard._scan.bundles import GraphInput
from torch_shard._scan.piece_values import Cut
from torch_shard._scan.pieces import take_apart
from torch_shard._scan.region import LAYER, Call, Region
from torch_shard._sharding import Pieces


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
        """Rewrite a loss, and its layers, for entries in pieces, and note on the nodes how others are used."""
        if not self.cuts and not self.uses:
            return
        graph, named, trained = captured.module.graph, captured.aux.inputs, captured.aux.grads
        given = dict(zip((node for node in graph.nodes if node.op == "placeholder"), named, strict=False))
        regions: dict[int, tuple[Region, list[str]]] = {}
        for node in graph.nodes:
            if node.target is LAYER:
                number, tensors = args_of(node)
                call, arguments = calls[number], [given.get(tensor) for tensor in tensors]
                names = [_name(arguments[i], member) for i, member in call.arguments]
                regions.setdefault(id(call.region), (call.region, names))
        for region, names in regions.values():
            self._put_on_layer(region, names)
        inputs = {node: name for node, name in given.items() if isinstance(name, str)}
        self._put(graph, inputs, {1 + at: name for at, name in enumerate(trained) if isinstance(name, str)}, calls)

    def _put_on_layer(self, region: Region, names: Sequence[str]) -> None:
        graph = region.graph.module.graph
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        tensors = [node for node, (kind, _) in zip(nodes, region.inputs, strict=True) if kind != "cotangent"]
        grads = {region.num_results + at: names[position] for at, position in enumerate(region.gradients)}
        self._put(graph, dict(zip(tensors, names, strict=True)), grads, {})

    def _put(
        self, graph: Graph, inputs: Mapping[Node, str], grads: Mapping[int, str], calls: Mapping[int, Call]
    ) -> None:
        for node, name in inputs.items():
            if name in self.uses:
                node.meta[USED_AS] = self._use(name, len(shape_of(node)))
        if self.cuts:
            cuts = {node: self.cuts[name] for node, name in inputs.items() if name in self.cuts}
            take_apart(graph, cuts, {at: self.cuts.get(name) for at, name in grads.items()}, calls)

    def _use(self, name: str, ndim: int) -> PartitionSpec:
        """How an entry is split in use, in the form in which a program takes it: each piece is split alike."""
        spec = self.uses[name]
        return Pieces(*self.cuts[name]).stored_spec(spec, ndim=ndim) if name in self.cuts else spec


def _name(given: GraphInput | None, member: int | None) -> str:
    """The name of an argument of a layer; empty for what is not an entry."""
    if given is None or isinstance(given, str):
        return given or ""
    return "" if member is None else given.names[member]
