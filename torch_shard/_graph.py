"""Reading FX graphs: their nodes' arguments and outputs, which PyTorch types as anything."""

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a node; nodes stand for their values."""
    return node.args


def outputs_of(graph: Graph) -> list[Any]:
    """The nodes that a graph returns, as a flat list."""
    return list(args_of(graph.output_node())[0])


def fill_in(arguments: Any, value_of: Callable[[Node], Any]) -> Any:
    """Arguments with each node replaced by its value."""
    return map_arg(arguments, value_of)
