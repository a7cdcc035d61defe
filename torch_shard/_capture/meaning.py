"""What a captured program means, for comparison: what follows from Python's numbers alone stands in it as a value."""

import itertools
from collections.abc import Hashable

import torch
from torch.fx import Node

from torch_shard._capture.constants import Constants, bits_of, is_literal
from torch_shard._capture.trace import Captured
from torch_shard._common.fx import args_of, fill_in, is_random


def same_closure(first: Captured, second: Captured) -> bool:
    """Tell whether two captures with the same graph close over the same tensors.

    Literals are compared by value, and what the host is asked for by how it is computed there.
    """
    if first.host is not None and second.host is not None and first.host.meaning() == second.host.meaning():
        asked = {id(a): id(b) for a, b in zip(first.host.given, second.host.given, strict=True)}
    else:
        asked = {}
    return len(first.closure) == len(second.closure) and all(
        a is b or asked.get(id(a)) == id(b) or (is_literal(a) and is_literal(b) and bits_of(a) == bits_of(b))
        for a, b in zip(first.closure, second.closure, strict=True)
    )


def meaning(captured: Captured) -> tuple[Hashable, ...]:
    """The operators of a program in order; programs with equal ones compute the same.

    A causal mask is the same whether the program builds it or has it given.
    """
    graph = captured.module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    closure = dict(zip(inputs[len(inputs) - len(captured.closure) :], captured.closure, strict=True))
    constants = Constants(graph, None, {node: t for node, t in closure.items() if is_literal(t)})
    names: dict[Node, str] = {}
    numbers = itertools.count()

    def name(node: Node) -> str:
        if node not in names:
            value = constants.value(node)
            names[node] = bits_of(value) if isinstance(value, torch.Tensor) else f"%{next(numbers)}"
        return names[node]

    found: list[Hashable] = []
    for node in graph.nodes:
        if node in closure and not is_literal(closure[node]):
            names[node] = f"closure {id(closure[node])}"
        elif node.op == "placeholder":
            name(node)
        elif node.op != "call_function" or not isinstance(constants.value(node), torch.Tensor):
            place = node.meta.get("random_place") if is_random(node) else None
            args = args_of(node)
            if "called" in node.meta:  # its first argument is a number of this capture
                args = (node.meta["called"], *args[1:])
            found.append((str(node.target), repr(fill_in((args, node.kwargs), lambda n: _Name(name(n)))), place))
            name(node)
    return tuple(found)


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
