"""Masks of attention that are constants of the program: which of them only say that no query sees a later key."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture.data_dependence import constant_value

_LARGEST = 1 << 31  # elements of a mask that is looked at
_ROWS = 1024  # of it at a time


def is_causal_mask(mask: torch.Tensor) -> bool:
    """Tell whether a mask of a capture, of (..., T, S) broadcast over batch and heads, is the lower triangle, T = S."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.requires_grad:
        return False
    if mask.numel() > _LARGEST or (value := constant_value(mask)) is None:
        return False
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return _is_lower_triangle(value)


def _is_lower_triangle(value: torch.Tensor) -> bool:
    once = value[tuple(slice(0, 1) if not stride else slice(None) for stride in value.stride()[:-2])]
    for start in range(0, value.shape[-2], _ROWS):
        rows = once[..., start : start + _ROWS, :]
        wanted = torch.ones(rows.shape[-2:], dtype=torch.bool).tril(start)
        if not all(_allows(each, wanted) for each in rows.reshape(-1, *rows.shape[-2:])):
            return False
    return True


def _allows(rows: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Tell whether these rows of a mask let through just what is wanted."""
    if rows.dtype is torch.bool:
        return torch.equal(rows, wanted)
    lowest = torch.finfo(rows.dtype).min
    return bool((rows[wanted] == 0).all()) and bool((rows[~wanted] <= lowest).all())
