"""The canonical form of a graph: two graphs with equal forms compute the same.

Names of nodes are not a part of it: a source is named by its number.
Whoever compares graphs, nodes or layers (the second capture of a callable, captures that differ in numbers, repeated
layers, the line that an error shows) compares what `node_form` gives.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_shard._capture.constants import Constants, bits_of, is_literal
from torch_shard._common.fx import fill_in

LAYERS = ("torch_shard.layer.default", "torch_shard.layer_backward.default")
"""Operators, by name, whose first argument is the number of a call."""


class _Name(str):
    """A text that is its own `repr`, so that sources stand without quotes among other arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def node_form(
    node: Node,
    name_of: Callable[[Node], str],
    *,
    hidden: Collection[int | str] = (),
    calls: Mapping[int, Hashable] = MappingProxyType({}),
) -> tuple[str, ...]:
    """The operator of a node, and each of its arguments as text.

    Args:
        node: The node.
        name_of: Names its sources.
        hidden: Arguments, by position or name, that do not count.
        calls: What calls of layers are, by their numbers.
    """
    args: list[Any] = [None if position in hidden else value for position, value in enumerate(node.args)]
    kwargs = {key: None if key in hidden else value for key, value in node.kwargs.items()}

    # The first argument of these is a number that another capture of the same function does not repeat.
    if "called" in node.meta:
        args[0] = node.meta["called"]
    elif str(node.target) in LAYERS:
        args[0] = calls.get(args[0], args[0])

    named: Any = fill_in([*args, *kwargs.items()], lambda source: _Name(name_of(source)))
    target = node.op if node.op == "placeholder" else str(node.target)
    return target, *map(repr, named)


def value_form(value: object) -> Hashable:
    """Shapes and dtypes of what a node gives."""
    if isinstance(value, (tuple, list)):
        return tuple(map(value_form, value))
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else repr(value)


def nodes_of_closure(captured: Any) -> dict[Node, torch.Tensor]:
    """The inputs of a captured graph that are tensors which it closes over."""
    inputs = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    return dict(zip(inputs[len(inputs) - len(captured.closure) :], captured.closure, strict=True))


def canonical_form(captured: Any, inner: Iterable[GraphModule] = (), *, folded: bool = False) -> Hashable:
    """The canonical form of a captured graph and of the layers that it calls.

    Tensors that it closes over are themselves, literals are their values, and answers of the host are how they are
    computed there.

    Args:
        captured: The graph.
        inner: Graphs of the layers that it calls.
        folded: Whether what depends on no input is its values: a causal mask is then the same whether the graph builds
            it or closes over it. It computes them, which takes longer.
    """
    closure = nodes_of_closure(captured)
    literals = {node: tensor for node, tensor in closure.items() if is_literal(tensor)}
    constants = Constants(captured.module.graph, None, literals) if folded else None
    host = captured.host
    answers = {id(tensor): number for number, tensor in enumerate(host.given)} if host else {}

    def closed_over(node: Node) -> str | None:
        if node in literals:
            return bits_of(literals[node])
        if node not in closure:
            return None
        number = answers.get(id(closure[node]))
        return f"closure {id(closure[node])}" if number is None else f"answer {number}"

    graphs = [captured.module.graph, *(module.graph for module in inner)]
    forms: list[Hashable] = [tuple(host.meaning()) if host else None]
    for graph in graphs:
        names: dict[Node, str] = {}
        num_inputs_and_operators = 0
        for node in graph.nodes:
            value = constants.value(node) if constants is not None and graph is graphs[0] else None
            if isinstance(value, torch.Tensor):
                names[node] = bits_of(value)
                continue

            name = closed_over(node)
            names[node] = name or f"%{num_inputs_and_operators}"
            if name is None:
                num_inputs_and_operators += 1
                forms.append((*node_form(node, names.__getitem__), node.meta.get("random_place")))
    return tuple(forms)
