"""Constant comparisons of queries with keys in order: each query sees an interval of keys, known without the square."""

from collections.abc import Callable

import torch
from torch.fx import Node

from torch_shard._common.fx import args_of, aten_name, shape_of

Interval = tuple[torch.Tensor, torch.Tensor]
"""The first key that each query sees, and the one after the last; int64, (rows, T)."""

_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


def interval_of(part: Node, constant: Callable[[Node], torch.Tensor | None], size: tuple[int, int]) -> Interval | None:
    """The keys that a comparison of two constants lets through; None if it is no such comparison, or no interval."""
    name = aten_name(part)
    if name not in _MIRRORED or len(shape_of(part)) < 2 or shape_of(part)[-2:] != size:
        return None
    sides = [constant(side) if isinstance(side, Node) else torch.tensor(side) for side in args_of(part)[:2]]
    if any(side is None or side.is_floating_point() for side in sides):
        return None
    left, right = (s.long().reshape((1,) * (2 - s.ndim) + s.shape) for s in sides if s is not None)
    if left.shape[-1] != 1 and right.shape[-1] == 1:
        return _between(name, left, right, size)
    if right.shape[-1] != 1 and left.shape[-1] == 1:
        return _between(_MIRRORED[name], right, left, size)
    return None


def _between(name: str, keys: torch.Tensor, queries: torch.Tensor, size: tuple[int, int]) -> Interval | None:
    """The interval of `keys (..., 1, S) <name> queries (..., T, 1)`, of rows that are all compared alike."""
    if keys.shape[-2] != 1 or bool((keys.diff(dim=-1) < 0).any()):
        return None
    is_alike = keys.shape[:-2] == queries.shape[:-2]
    queries = queries.expand(*queries.shape[:-2], size[0], 1).reshape(-1, size[0])
    keys, queries = _once(keys.reshape(-1, size[1])), _once(queries)
    rows = max(len(keys), len(queries))
    if not is_alike and min(len(keys), len(queries)) != 1:
        return None
    keys, queries = (x.expand(rows, -1).contiguous() for x in (keys, queries))
    low = torch.searchsorted(keys, queries, right=name == "gt")
    high = torch.searchsorted(keys, queries, right=name != "lt")
    whole = torch.full_like(low, size[1])
    return {"le": (0 * low, high), "lt": (0 * low, high), "eq": (low, high)}.get(name, (low, whole))


def _once(rows: torch.Tensor) -> torch.Tensor:
    """One row of several that are the same."""
    return rows[:1] if torch.equal(rows, rows[:1].expand_as(rows)) else rows
