"""Masks of attention that are constants of the program: which of them say that a query sees no later key."""

import dataclasses

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture.data_dependence import constant_value

_LARGEST = 1 << 31  # elements of a mask that is looked at
_ROWS = 1024  # of it at a time


@dataclasses.dataclass(frozen=True)
class Seen:
    """Which keys a query sees: its own place and earlier ones.

    Attributes:
        window: So many of these; 0 for all.
        segments: None, or the numbers of the queries, (B, T), and of the keys, (B, S): only a key with the number of
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

    It is one where T = S and the mask is a constant.
    """
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.requires_grad:
        return None
    if not 0 < mask.numel() <= _LARGEST or (value := constant_value(mask)) is None:
        return None
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        once = value[tuple(slice(0, 1) if not stride else slice(None) for stride in value.stride()[:-2])]
        window = _width(once)
        return Seen(0 if window == mask.shape[-1] else window) if _is_band(once, window) else None


def _width(value: torch.Tensor) -> int:
    """How many keys the last query sees."""
    last = value.flatten(0, -2)[-1] if value.ndim > 1 else value
    return int(_lets_through(last).sum())


def _is_band(value: torch.Tensor, window: int) -> bool:
    """Tell whether each query sees its own place and the ones before it, this many together, and nothing else."""
    for start in range(0, value.shape[-2], _ROWS):
        rows = value[..., start : start + _ROWS, :]
        wanted = torch.ones(rows.shape[-2:], dtype=torch.bool).tril(start).triu(start - window + 1)
        if not all(_lets_just(each, wanted) for each in rows.reshape(-1, *rows.shape[-2:])):
            return False
    return True


def _lets_through(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dtype is torch.bool else rows == 0


def _lets_just(rows: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Tell whether these rows of a mask let through just what is wanted."""
    if rows.dtype is torch.bool:
        return torch.equal(rows, wanted)
    lowest = torch.finfo(rows.dtype).min
    return bool((rows[wanted] == 0).all()) and bool((rows[~wanted] <= lowest).all())
