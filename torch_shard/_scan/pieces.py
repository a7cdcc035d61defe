"""Fused projections that are stored in pieces: a graph in which the pieces have a dim of their own.

The product of such a projection is split over devices by what is in each piece, so that cutting it moves nothing: of
two dims that a product sums over, or gives, one contraction is made. Views, products, sums and what works element by
element are rewritten so, until the model's own split takes the pieces apart; where one is cut out, it is a value by
itself. For all other operators the pieces are put together, which is right, and slower.

A backward pass puts the gradients of the pieces together. That these are to stay apart is seen from what they are for:
the gradient of an entry in pieces is followed back to where it is put together.
"""

import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_shard._common.fx import args_of, aten_name, fill_in, is_random, notes_of, operator_name, outputs_of, shape_of
from torch_shard._common.operator_families import RESHAPES, is_pointwise
from torch_shard._lowering import CONSTRAINED, own_of
from torch_shard._scan.piece_rules import PRODUCTS, TURNS, cut_in_view, filled, moved_to, rule_of
from torch_shard._scan.piece_values import Apart, Builder, Cut, cut_shape, empty, node_of
from torch_shard._scan.region import LAYER, LAYER_BACKWARD, Call

logger = logging.getLogger(__name__)


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
        elif len(node.all_input_nodes) == 1 and (source := node.all_input_nodes[0]) in known and _keeps_size(node):
            num, dim = known[source]
            known[node] = num, moved_to(node, source, dim) or dim
    return _followed(waiting)


def _keeps_size(node: Node) -> bool:
    return is_pointwise(node) or node.target is CONSTRAINED or aten_name(node) in TURNS


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
