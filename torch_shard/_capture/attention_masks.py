"""Masks of attention that say which keys a query sees by place: no later ones, perhaps of a window or a document."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture.data_dependence import constant_value, traced
from torch_shard._common.fx import args_of, aten_name, shape_of
from torch_shard._common.operator_families import COPIES

_LARGEST = 1 << 31  # elements of a mask that is looked at
_ROWS = 1024  # of it at a time


@dataclasses.dataclass(frozen=True)
class Seen:
    """Which keys a query sees: its own place and earlier ones.

    Attributes:
        window: So many of these; 0 for all.
        segments: Empty, or the numbers of the queries, (B, T), and of the keys, (B, S): only a key with the number of
            the query is seen.
    """

    window: int = 0
    segments: tuple[torch.Tensor, ...] = ()

    def mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """The same as a mask, (T, S) or (B, 1, T, S)."""
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        if self.window:
            seen = seen.triu(1 - self.window)
        if not self.segments:
            return seen
        queries, keys = self.segments
        return seen & (queries[:, None, :, None] == keys[:, None, None, :])


def seen_through(mask: torch.Tensor) -> Seen | None:
    """What a mask of a capture lets through, of (..., T, S) broadcast over batch and heads; None if that is no `Seen`.

    It is one where T = S and the mask is a constant, or one (a triangle, a band) and what depends on the batch: which
    keys are padding, and which places belong to one document.
    """
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.requires_grad or not 0 < mask.numel() <= _LARGEST:
        return None
    if (value := constant_value(mask)) is not None:
        window = _band(value)
        return None if window is None else Seen(window)
    return _by_segments(mask) if mask.dtype is torch.bool and mask.ndim == 4 and mask.shape[1] == 1 else None


def _by_segments(mask: torch.Tensor) -> Seen | None:
    """What a mask of (B, 1, T, T) says that joins, by `&`, a constant one with others of the batch."""
    if (found := traced(mask)) is None:
        return None
    node, constant = found
    parts = _conjuncts(node)
    values = [value for part in parts if (value := constant(part)) is not None]
    others = [part for part in parts if constant(part) is None]
    documents = [part for part in others if not _is_padding(part)]
    if not values or not all(_is_same_document(part, constant) for part in documents):
        return None
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        window = _band(functools.reduce(torch.logical_and, values))
    if window is None or (window and documents):
        return None
    return Seen(window, _documents(mask) if documents else _padding(mask))


def _padding(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each place sees itself, unless it is padding."""
    keys = mask.diagonal(dim1=-2, dim2=-1)[:, 0].to(torch.int32)
    return torch.ones_like(keys), keys


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


def _band(value: torch.Tensor) -> int | None:
    """How many keys up to its own place each query sees, 0 for all of them; None if that is not what it sees."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        once = value[tuple(slice(0, 1) if not stride else slice(None) for stride in value.stride()[:-2])]
        last = once.flatten(0, -2)[-1]
        window = int((last if last.dtype is torch.bool else last == 0).sum())
        if not _is_band(once, window):
            return None
        return 0 if window == value.shape[-1] else window


def _is_band(value: torch.Tensor, window: int) -> bool:
    """Tell whether each query sees its own place and the ones before it, this many together, and nothing else."""
    for start in range(0, value.shape[-2], _ROWS):
        rows = value[..., start : start + _ROWS, :]
        wanted = torch.ones(rows.shape[-2:], dtype=torch.bool).tril(start).triu(start - window + 1)
        if not all(_lets_just(each, wanted) for each in rows.reshape(-1, *rows.shape[-2:])):
            return False
    return True


def _lets_just(rows: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Tell whether these rows of a mask let through just what is wanted."""
    if rows.dtype is torch.bool:
        return torch.equal(rows, wanted)
    lowest = torch.finfo(rows.dtype).min
    return bool((rows[wanted] == 0).all()) and bool((rows[~wanted] <= lowest).all())
