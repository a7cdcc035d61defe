"""The autograd graph behind the tensors of a capture."""

from collections.abc import Iterable, Iterator

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Node]:
    """The nodes of the autograd graph, each once."""
    seen: set[Node] = set()
    todo = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
            yield node


def runs_user_backward(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether the backward pass runs Python that may call autograd or write to `.grad` itself."""
    return any(
        isinstance(node, BackwardCFunction) and not type(node).__module__.startswith("torch_shard.")
        for node in nodes_behind(tensors)
    )


def leaves_behind(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that the backward pass accumulates gradients for."""
    variables = (getattr(node, "variable", None) for node in nodes_behind(tensors))
    return [leaf for leaf in variables if isinstance(leaf, torch.Tensor)]
