"""Masks of attention that say which keys a query sees by place: all, no later ones, of a window, of a document."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch.fx import Node

from torch_shard._capture import current_values, in_eager_torch
from torch_shard._common.fx import COPIES, args_of, aten_name, shape_of

Interval = tuple[torch.Tensor, torch.Tensor]
"""The first key that each query sees, and the one after the last; int64, (rows, T)."""

_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


def interval_of(part: Node, constant: Callable[[Node], torch.Tensor | None], size: tuple[int, int]) -> Interval | None:
    """The keys that a constant part of a mask lets each query see; None if it is none, or if these are no interval."""
    if (found := _of_comparison(part, constant, size)) is not None:
        return found
    return None if (value := constant(part)) is None else _of_value(value.bool(), size)


def _of_comparison(
    part: Node, constant: Callable[[Node], torch.Tensor | None], size: tuple[int, int]
) -> Interval | None:
    """The keys that a comparison of constant queries with keys in order lets through, known without the square."""
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


def _of_value(value: torch.Tensor, size: tuple[int, int]) -> Interval | None:
    """The keys that a mask, or what is added to scores, lets through."""
    once = value[tuple(slice(None) if stride else slice(0, 1) for stride in value.stride())]
    if once.numel() > _LARGEST:
        return None
    once = once[(None,) * (3 - once.ndim)].flatten(0, -3)
    parts = [_of_rows(rows, size[1]) for rows in once.flatten(0, 1).split(_ROWS)]
    if None in parts:
        return None
    low, high = (torch.cat(bound).view(once.shape[:2]) for bound in zip(*filter(None, parts), strict=True))
    return _once(low).expand(-1, size[0]), _once(high).expand(-1, size[0])


def _of_rows(rows: torch.Tensor, num_keys: int) -> Interval | None:
    sees = rows if rows.dtype is torch.bool else rows == 0
    if rows.dtype is not torch.bool and not (sees | (rows <= torch.finfo(rows.dtype).min)).all():
        return None
    seen = sees.expand(-1, num_keys).numpy()
    low, high = seen.argmax(1), num_keys - seen[:, ::-1].argmax(1)
    is_interval = (np.count_nonzero(seen, 1) == high - low).all()
    return (torch.from_numpy(low), torch.from_numpy(high)) if is_interval else None


def _once(rows: torch.Tensor) -> torch.Tensor:
    """One row of several that are the same."""
    return rows[:1] if torch.equal(rows, rows[:1].expand_as(rows)) else rows


_LARGEST = 1 << 31  # elements of a mask that is looked at
_ROWS = 1024  # of it at a time


@dataclasses.dataclass(frozen=True)
class Seen:
    """Which keys a query sees.

    Attributes:
        before: So many before its own place; None for all.
        after: So many after it; None for all.
        segments: Empty, or the numbers of the queries, (B, T), and of the keys, (B, S), from -2: only a key with the
            number of the query is seen.
    """

    before: int | None = None
    after: int | None = None
    segments: tuple[torch.Tensor, ...] = ()

    def mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """The same as a mask, (T, S) or (B, 1, T, S)."""
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
        seen = seen if self.after is None else seen.tril(self.after)
        seen = seen if self.before is None else seen.triu(-self.before)
        if not self.segments:
            return seen
        queries, keys = self.segments
        return seen & (queries[:, None, :, None] == keys[:, None, None, :])


def seen_through(mask: torch.Tensor, size: tuple[int, int]) -> Seen | None:
    """What a mask of a capture lets through, broadcast over batch, heads, queries and keys; None if that is no `Seen`.

    It is one where the mask is a constant band (all, a triangle, a window), or one and what depends on the batch: which
    keys are padding, and which places belong to one document.
    """
    if mask.ndim < 2 or mask.requires_grad or not mask.numel():
        return None
    if (value := current_values().constant(mask)) is not None:
        with in_eager_torch():
            return _band([_of_value(value, size)], size)
    if mask.dtype is not torch.bool or mask.shape[-1] != size[1]:
        return None
    if mask.ndim == 4 and _is_one(mask, 1) and _is_one(mask, 2):
        return Seen(segments=_padding(mask[:, 0, 0], size))
    return _by_segments(mask, size) if mask.shape[-2:] == size else None


def _is_one(mask: torch.Tensor, dim: int) -> bool:
    """Tell whether a mask is the same all along a dim, as it is one there or repeats it."""
    return mask.shape[dim] == 1 or not mask.stride(dim)


def _by_segments(mask: torch.Tensor, size: tuple[int, int]) -> Seen | None:
    """What a mask of (B, 1, T, S) says that joins, by `&`, constant ones with others of the batch."""
    if (of_trace := current_values().traced(mask)) is None:
        return None
    node, constant = of_trace
    parts = _conjuncts(node)
    with in_eager_torch():
        found = {part: interval_of(part, constant, size) for part in parts}
        others = [part for part in parts if found[part] is None and constant(part) is None]
        band = _band([found[part] for part in parts if part not in others], size)
    documents = [part for part in others if not _is_padding(part)]
    if band is None or not all(_is_same_document(part, constant) for part in documents):
        return None
    if not others:
        return band
    if mask.ndim != 4 or mask.shape[1] != 1:
        return None
    if documents:
        is_plain = band.before is None and band.after in (0, None) and size[0] == size[1]
        return dataclasses.replace(band, segments=_documents(mask)) if is_plain else None
    if band == Seen():
        keys = mask[:, 0, 0]
    elif size[0] != size[1]:
        return None
    else:
        keys = mask[:, 0, -1] if band.before is None else mask.diagonal(dim1=-2, dim2=-1)[:, 0]
    return dataclasses.replace(band, segments=_padding(keys, size))


def _band(intervals: list[Interval | None], size: tuple[int, int]) -> Seen | None:
    """The band of what intervals together let through, if it is one."""
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(intervals):
        return None
    everything = _interval(Seen(), size)
    first = functools.reduce(torch.maximum, [low for low, _ in known], everything[0])
    end = functools.reduce(torch.minimum, [high for _, high in known], everything[1])
    if first[0, 0] or (first >= end).any():
        return None
    before, after = size[0] - 1 - int(first[-1, -1]), int(end[0, 0]) - 1
    band = Seen(before if before < size[0] - 1 else None, after if after < size[1] - 1 else None)
    wanted = _interval(band, size)
    return band if bool((first == wanted[0]).all() and (end == wanted[1]).all()) else None


def _interval(band: Seen, size: tuple[int, int]) -> Interval:
    """The keys of a band, of one row."""
    places = torch.arange(size[0])[None]
    first = 0 * places if band.before is None else (places - band.before).clamp(min=0)
    end = torch.full_like(places, size[1]) if band.after is None else (places + band.after + 1).clamp(max=size[1])
    return first, end


def _padding(keys: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Keys that are no padding have the number of all queries."""
    return keys.new_ones((len(keys), size[0]), dtype=torch.int32), keys.to(torch.int32)


def _documents(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first key that a query sees is the same for all of a document; some see none, and no query sees padding."""
    first = mask[:, 0].to(torch.int32).argmax(-1).to(torch.int32)
    sees, is_seen = mask[:, 0].any(-1), mask.diagonal(dim1=-2, dim2=-1)[:, 0]
    return torch.where(sees, first, -1), torch.where(is_seen, first, -2)


def _conjuncts(node: Node) -> list[Node]:
    if aten_name(node) in ("bitwise_and", "logical_and") and len(node.all_input_nodes) == 2:
        return [part for source in args_of(node) for part in _conjuncts(source)]
    is_same = aten_name(node) in COPIES | {"expand"} or _is_leading(node)
    return _conjuncts(args_of(node)[0]) if is_same else [node]


def _is_leading(node: Node) -> bool:
    """Tell whether a node only adds a dim before the last two."""
    return aten_name(node) == "unsqueeze" and args_of(node)[1] % len(shape_of(node)) < len(shape_of(node)) - 2


def _is_padding(part: Node) -> bool:
    """Tell whether a part of a mask is the same for all heads and queries."""
    return all(size == 1 for size in shape_of(part)[-3:-1]) and len(shape_of(part)) in (2, 4)


def _is_same_document(part: Node, constant: Callable[[Node], torch.Tensor | None]) -> bool:
    """Tell whether a part of a mask compares the numbers of queries with the very same numbers of keys."""
    shape = shape_of(part)
    if aten_name(part) != "eq" or len(part.all_input_nodes) != 2 or len(shape) < 2 or shape[-2] != shape[-1]:
        return False
    labels = [_labels(side, constant) for side in args_of(part)]
    if labels[0] is None or labels[1] is None or labels[0][0] is not labels[1][0]:
        return False
    shapes = [shape_of(side) for side in args_of(part)]
    is_apart = {own[-2:] for own in shapes} == {(shape[-2], 1), (1, shape[-1])}
    places = labels[0][1], labels[1][1]
    return is_apart and len(places[0]) == len(places[1]) and all(map(torch.equal, *places))


def _labels(side: Node, constant: Callable[[Node], torch.Tensor | None]) -> tuple[Node, list[torch.Tensor]] | None:
    """What one side of a comparison is of, and the places there of its elements, in order."""
    while aten_name(side) in ("unsqueeze", "expand") or aten_name(side) in COPIES:
        side = args_of(side)[0]
    if aten_name(side) != "index":
        return side, []
    source, indices = args_of(side)
    values = [None if index is None else constant(index) for index in indices]
    if any(value is None for value in values):
        return None
    return source, [value.flatten() for value in values if value is not None]
