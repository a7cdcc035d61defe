"""Overrides of PyTorch's own in a capture: by function, by attribute of a class or module, by ATen operator.

The tables are empty here. Whoever has something better to offer fills them with the decorators, so that an operator of
ours is one file, and the capture, which reads them, knows none of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node

F = TypeVar("F", bound=Callable[..., Any])

Rewrite = Callable[[Node], Node | None]

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Overrides of functions of torch, where a torch function mode sees the call."""

ATTRIBUTES: list[tuple[Any, str, Callable[..., Any]]] = []
"""Overrides of what is not such a function: owner, name, and what is called instead."""

OPERATORS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Overrides of ATen operators, while the callable is traced."""

REWRITES: dict[torch._ops.OpOverload, Rewrite] = {}
"""Rewrites of a node of the functional graph: to another node, or None to leave it."""


def instead_of(*functions: Any) -> Callable[[F], F]:
    """Let a capture call the decorated function instead of these functions of torch."""
    return lambda fn: FUNCTIONS.update(dict.fromkeys(functions, fn)) or fn


def instead_of_attribute(owner: Any, name: str) -> Callable[[F], F]:
    """Let a capture find the decorated function under this name of a class or module."""
    return lambda fn: ATTRIBUTES.append((owner, name, fn)) or fn


def instead_of_operator(*operators: torch._ops.OpOverload) -> Callable[[F], F]:
    """Let a capture trace the decorated function instead of these ATen operators."""
    return lambda fn: OPERATORS.update(dict.fromkeys(operators, fn)) or fn


def rewrites(*operators: torch._ops.OpOverload) -> Callable[[F], F]:
    """Let the decorated function rewrite the nodes of these ATen operators in functional graphs."""
    return lambda fn: REWRITES.update(dict.fromkeys(operators, fn)) or fn


def is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors have one floating-point dtype and are used as they are, without autocast or a transform."""
    return (
        all(t.is_floating_point() and t.dtype == tensors[0].dtype for t in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not any(map(is_functorch_wrapped_tensor, tensors))
        and torch.autograd.forward_ad._current_level < 0
    )
