"""What a capture has left behind in caches that nobody named: tensors without values get those that they stand for.

A mask that `functools.lru_cache` keeps, or a dict in another file, is a constant of the program. It was made within the
capture, so that it has no value; but everything that it was made of is known.
"""

import collections
import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import torch

from torch_shard._capture.data_dependence import forget_left_over, left_over
from torch_shard._capture.fakes import constants_of
from torch_shard._capture.function_mode import current_mode

_DEPTH = 3  # a tuple of tensors in a tuple in a cache


def give_values() -> None:
    """Put real tensors into the places of those that captures of this thread have left in containers and caches."""
    if current_mode() is not None:
        return
    try:
        _give_values()
    finally:
        forget_left_over()


def _give_values() -> None:
    if all(value is None for value in constants_of(left_over())):
        return
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what is frozen is not found
    try:
        gc.collect()  # what only cycles hold
        old: list[Any] = left_over()
        new: list[Any] = constants_of(old)
        for _ in range(_DEPTH):
            if not old:
                return
            old, new = _replace(old, new)
    finally:
        if frozen:
            gc.freeze()


def _replace(old: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
    """Replace values in what holds them; returns the tuples among that, and what they are to be."""
    places = {id(value): at for at, value in enumerate(old)}

    def renewed(value: object) -> Any:
        at = places.get(id(value))
        return value if at is None or new[at] is None else new[at]

    tuples = []
    for holder in gc.get_referrers(*old):
        if isinstance(holder, tuple):
            tuples.append(holder)
        elif holder is not old:
            _renew(holder, renewed)
    return tuples, [_like(holder, map(renewed, tuple.__iter__(holder))) for holder in tuples]


def _renew(holder: Any, renewed: Callable[[object], Any]) -> None:
    if isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
    elif isinstance(holder, dict):
        for key, value in list(holder.items()):
            if (now := renewed(value)) is not value:
                holder[key] = now  # the outputs of Hugging Face have no `update`
    elif isinstance(holder, list | collections.deque):
        for at, value in enumerate(holder):
            holder[at] = renewed(value)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = renewed(holder.cell_contents)
    elif isinstance(getattr(holder, "__dict__", None), dict) and not isinstance(holder, torch.Tensor):
        _renew(vars(holder), renewed)


def _like(holder: Any, items: Any) -> Any:
    return holder._make(items) if hasattr(holder, "_make") else tuple(items)
