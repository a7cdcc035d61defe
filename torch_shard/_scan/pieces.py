"""Fused projections that are stored in pieces: a graph in which the pieces have a dim of their own.

The product of such a projection is split over devices by what is in each piece, so that cutting it moves nothing: of
two dims that a product sums over, or gives, one contraction is made. Views, products, sums and what works element by
element are rewritten so, until the model's own split takes the pieces apart; where one is cut out, it is a value by
itself. For all other operators the pieces are put together, which is right, and slower.

A backward pass puts the gradients of the pieces together. That these are to stay apart is seen from what they are for:
the gradient of an entry in pieces is followed back to where it is put together.

How other entries are used is noted on the nodes.
"""

import dataclasses
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jax.sharding import PartitionSpec
from torch.fx import Graph, Node

from torch_shard._capture import Captured
from torch_shard._common.fx import (
    RESHAPES,
    args_of,
    aten_name,
    fill_in,
    is_pointwise,
    is_random,
    notes_of,
    operator_name,
    outputs_of,
    shape_of,
)
from torch_shard._lowering import CONSTRAINED, USED_AS, own_of
from torch_shard._scan.piece_rules import (
    PRODUCTS,
    TURNS,
    Apart,
    Builder,
    Cut,
    cut_in_view,
    cut_shape,
    empty,
    filled,
    moved_to,
    node_of,
    rule_of,
)
from torch_shard._scan.region import LAYER, LAYER_BACKWARD, Call, Region
from torch_shard._scan.siblings import GraphInput
from torch_shard._sharding import Pieces

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EntryNotes:
    """What a plan says of the inputs and gradients of a capture, and of its repeated layers, by the names of entries.

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
        given = dict(zip(graph.find_nodes(op="placeholder"), named, strict=False))
        regions: dict[Region, list[str]] = {}
        for node in graph.nodes:
            if node.target is LAYER:
                number, tensors = args_of(node)
                call, arguments = calls[number], [given.get(tensor) for tensor in tensors]
                names = [_name(arguments[i], member) for i, member in call.arguments]
                regions.setdefault(call.region, names)
        for region, names in regions.items():
            self._put_on_layer(region, names)
        inputs = {node: name for node, name in given.items() if isinstance(name, str)}
        self._put(graph, inputs, {1 + at: name for at, name in enumerate(trained) if isinstance(name, str)}, calls)

    def _put_on_layer(self, region: Region, names: Sequence[str]) -> None:
        graph = region.graph.module.graph
        nodes = zip(graph.find_nodes(op="placeholder"), region.inputs, strict=True)
        tensors = [node for node, (kind, _) in nodes if kind != "cotangent"]
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


def take_apart(
    graph: Graph, inputs: Mapping[Node, Cut], grads: Mapping[int, Cut | None], calls: Mapping[int, Call]
) -> None:
    """Rewrite a graph for entries in pieces.

    Args:
        graph: Functional.
        inputs: Those that are given in pieces.
        grads: Of outputs that are gradients, whether they are to be in pieces too.
        calls: The calls of layers in it.
    """
    outputs = outputs_of(graph)
    wanted = _wanted(graph, inputs, {outputs[at]: cut for at, cut in grads.items() if cut is not None})
    builder = Builder(wanted)
    rewriter = _Rewriter(builder, calls)
    for node in list(graph.nodes):
        if node in inputs:
            rewriter.keep(node, inputs[node])
        elif node.op == "call_function":
            rewriter.rewrite(node)
    end = graph.output_node()
    for at, node in enumerate(outputs):
        if isinstance(node, Node):
            cut = grads.get(at)
            value = rewriter.value(node)
            outputs[at] = builder.whole(end, value) if cut is None else builder.as_pieces(end, value, *cut)
    end.args = (tuple(outputs),)
    graph.eliminate_dead_code()
    for node in inputs:
        graph.erase_node(node)


class _Rewriter:
    def __init__(self, builder: Builder, calls: Mapping[int, Call]) -> None:
        self._builder, self._calls = builder, calls
        self._values: dict[Node, Any] = {}
        """What stands for nodes: of one with several results, a list."""
        self._layers: dict[int, list[Node]] = {}
        self._warned: set[str] = set()

    def value(self, node: Node) -> Any:
        return self._values.get(node, node)

    def keep(self, node: Node, cut: Cut) -> None:
        """Let a node that gives its value in pieces take the place of one of the whole."""
        with node.graph.inserting_before(node):
            new = node.graph.create_node(node.op, node.target, node.args, node.kwargs)
        new.meta = {**node.meta, "val": empty(cut_shape(shape_of(node), *cut), node)}
        self._values[node] = Apart(new, shape_of(node), *cut)

    def rewrite(self, node: Node) -> None:
        if node.target is LAYER:
            self._layers[args_of(node)[0]] = list(args_of(node)[1])
            for source in node.all_input_nodes:
                node.replace_input_with(source, node_of(self.value(source)))
        elif node.target is operator.getitem:
            self._take(node)
        elif node in self._builder.wanted or any(source in self._values for source in node.all_input_nodes):
            self._operate(node)

    def _take(self, node: Node) -> None:
        source, index = args_of(node)
        if source in self._values:
            self._put(node, self._values[source][index])
        elif source.target is LAYER_BACKWARD:
            number = args_of(source)[0]
            argument = self.value(self._layers[number][list(self._calls[number].gradients)[index]])
            if isinstance(argument, Apart):
                self.keep(node, argument.cut)

    def _operate(self, node: Node) -> None:
        rule = None if is_random(node) or own_of(node) is not None else rule_of(node)
        args, named = fill_in((node.args, node.kwargs), self.value)
        found = None if rule is None else rule(self._builder, node, args, named)
        if found is None:
            self._merge_sources(node)
            found = node
        if (cut := self._builder.wanted.get(node)) is not None and not isinstance(found, list):
            found = Apart(self._builder.as_pieces(node.next, found, *cut), shape_of(node), *cut)
        self._put(node, found)

    def _put(self, node: Node, found: Any) -> None:
        """Let what was found stand for a node."""
        if isinstance(found, Node):
            if found is not node:
                node.replace_all_uses_with(found)
        else:
            self._values[node] = found

    def _merge_sources(self, node: Node) -> None:
        for source in node.all_input_nodes:
            if isinstance(value := self.value(source), Apart):
                if "experts" not in operator_name(node):  # whose pieces meet where the expert is
                    self._warn(node)
                node.replace_input_with(source, self._builder.whole(node, value))

    def _warn(self, node: Node) -> None:
        where = notes_of(node).get("module", "")
        if (what := f"{node.target}{f' in {where}' * bool(where)}") not in self._warned:
            self._warned.add(what)
            logger.warning(
                "A fused projection that is stored in pieces is put together for %s, and moves between devices there, "
                "as one that is not: only views, products, sums and operators on each element keep pieces apart, until "
                "the model cuts them. The results are right.",
                what,
            )


def _wanted(graph: Graph, inputs: Mapping[Node, Cut], grads: Mapping[Any, Cut]) -> dict[Node, Cut]:
    """The nodes that put pieces together which are to stay apart: gradients of entries, and factors of pieces."""
    known, waiting = dict(inputs), [*grads.items()]
    for node in graph.nodes:
        if aten_name(node) in PRODUCTS:
            left, right = args_of(node)
            for factor, dim, other, summed in ((left, -1, right, -2), (right, -2, left, -1)):
                if factor in known and known[factor][1] == dim:
                    waiting.append((other, (known[factor][0], summed)))
        elif (
            len(node.all_input_nodes) == 1
            and (source := node.all_input_nodes[0]) in known
            and (is_pointwise(node) or node.target is CONSTRAINED or aten_name(node) in TURNS)
        ):
            num, dim = known[source]
            known[node] = num, moved_to(node, source, dim) or dim
    return _followed(waiting)


def _followed(waiting: list[tuple[Node, Cut]]) -> dict[Node, Cut]:
    """Follow what is wanted in pieces back to where it is made."""
    found: dict[Node, Cut] = {}
    while waiting:
        node, cut = waiting.pop()
        if node.op != "call_function" or node in found or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if aten_name(node) in ("cat", "slice_scatter") or node.target in RESHAPES:
            found[node] = cut
        waiting += _sources(node, cut)
    return found


def _sources(node: Node, wanted: Cut) -> list[tuple[Node, Cut]]:
    """The sources of which the dim in pieces is, and where it is there."""
    num, dim = wanted
    if node.target in RESHAPES:
        source = args_of(node)[0]
        found = cut_in_view(shape_of(node), wanted, shape_of(source))
        return [] if found is None else [(source, found)]
    if rule_of(node) is None or (aten_name(node) == "cat" and _puts_together(node, dim)):
        return []
    given = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    if aten_name(node) == "slice_scatter":
        given = given[:1]
    pairs = ((source, at) for source in given for at in range(-len(shape_of(source)), 0))
    size = shape_of(node)[dim]
    return [(x, (num, at)) for x, at in pairs if shape_of(x)[at] == size and moved_to(node, x, at) == dim]


def _puts_together(node: Node, dim: int) -> bool:
    ndim = len(shape_of(node))
    return filled(args_of(node), None, 0)[1] % ndim == ndim + dim
