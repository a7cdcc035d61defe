"""The arithmetic of a node of a captured graph: multiplications and additions of products."""

# PyTorch types the arguments of nodes as anything.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from torch_shard._common.fx import operator_name

ATTENTION = ("attention", "attention_backward")

PASSES = 4.5
"""Products of attention in both passes over those of the forward pass: of nine, seven are in the backward kernels."""


def flops_of(node: Node) -> float:
    """Flops of the products of a node; zero for what is none."""
    count = _COUNTS.get(operator_name(node))
    return 0.0 if count is None else float(count([_value(given) for given in node.args], _value(node)))


def _value(given: Any) -> Any:
    """The value that a node stands for, within lists as well."""
    if isinstance(given, Node):
        return given.meta.get("val")
    return [_value(part) for part in given] if isinstance(given, list | tuple) else given


def _matrices(at: int) -> Callable[[Sequence[Any], Any], float]:
    """Of a product that sums over the last dim of the argument at this position."""
    return lambda args, out: 2 * out.numel() * args[at].shape[-1]


def _tensordot(args: Sequence[Any], out: torch.Tensor) -> float:
    return 2 * out.numel() * math.prod(args[0].shape[dim] for dim in args[2])


def _convolution(args: Sequence[Any], out: torch.Tensor) -> float:
    return 2 * out.numel() * math.prod(args[1].shape[1:])


def _convolution_backward(args: Sequence[Any], out: Any) -> float:
    return 2 * args[0].numel() * math.prod(args[2].shape[1:]) * sum(bool(asked) for asked in args[-1][:2])


def _scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _seen(band: Sequence[int], queries: int, keys: int) -> float:
    """The part of queries and keys within a band: so many before and after, negative for all."""
    at = np.arange(queries)
    first = np.zeros(queries) if band[0] < 0 else np.clip(at - band[0], 0, keys)
    last = np.full(queries, keys) if band[1] < 0 else np.clip(at + band[1] + 1, 0, keys)
    return float(np.clip(last - first, 0, None).sum() / (queries * keys))


def _attention(args: Sequence[Any], out: Any) -> float:
    q, k, v = args[:3]
    return _scores(q, k, v) * _seen(args[5], q.shape[-2], k.shape[-2])


def _attention_backward(args: Sequence[Any], out: Any) -> float:
    q, k, v = args[1][:3]
    return (PASSES - 1) * _scores(q, k, v) * _seen(args[4], q.shape[-2], k.shape[-2])


def _expert_products(ids: torch.Tensor, matrices: Sequence[torch.Tensor]) -> float:
    return 2 * ids.numel() * sum(math.prod(matrix.shape[1:]) for matrix in matrices if matrix.ndim == 3)


def _experts(args: Sequence[Any], out: Any) -> float:
    return _expert_products(args[1], args[3])


def _experts_backward(args: Sequence[Any], out: Any) -> float:
    return 2 * _expert_products(args[2], args[4])


_COUNTS: dict[str, Callable[[Sequence[Any], Any], float]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "linear", "mv", "dot", "_grouped_mm", "grouped_mm"), _matrices(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _matrices(1)),
    "tensordot": _tensordot,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "experts": _experts,
    "experts_backward": _experts_backward,
}
