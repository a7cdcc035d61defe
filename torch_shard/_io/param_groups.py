"""Numbers of an optimizer's parameter groups, and what else is plain, as JSON and back."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_shard._common.caller import caller

logger = logging.getLogger(__name__)


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups say besides their parameters: `lr`, `betas`, ..."""
    return [plain({name: v for name, v in group.items() if name != "params"}) for group in optimizer.param_groups]


def take_groups(optimizer: torch.optim.Optimizer, kept: Sequence[Mapping[str, Any]]) -> None:
    """Give the groups what `plain_groups` had of them, as `optimizer.load_state_dict` does, and warn of what is new."""
    for number, (group, own) in enumerate(zip(optimizer.param_groups, kept, strict=False)):
        taken = {name: like(group.get(name), value) for name, value in own.items()}
        others = [f"{name} {group[name]!r} -> {v!r}" for name, v in taken.items() if name in group and group[name] != v]
        if others:
            logger.warning(
                "%s: group %d of the optimizer takes the numbers of the checkpoint, as optimizer.load_state_dict "
                "does: %s. For those of the script, set them afterwards (with fit, in a callback).",
                *(caller(), number, ", ".join(others)),
            )
        group.update(taken)


def plain(value: Any) -> Any:
    """What JSON can hold of a value; of dicts and lists, what it can hold of what is in them."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(value, Mapping):
        items = {str(name): plain(inner) for name, inner in value.items()}
        return {name: inner for name, inner in items.items() if inner is not _NOT_PLAIN}
    if isinstance(value, list | tuple):
        found = list(map(plain, value))
        return _NOT_PLAIN if any(inner is _NOT_PLAIN for inner in found) else found
    return value if isinstance(value, int | float | str | None) else _NOT_PLAIN


_NOT_PLAIN = object()


def like(present: Any, value: Any) -> Any:
    """A value from JSON in the form of what is there now: tuples, tensors, and keys that are numbers."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype)
    if isinstance(value, dict) and isinstance(present, Mapping):
        keys = {str(key): key for key in present}
        numbered = bool(keys) and all(isinstance(key, int) for key in present)
        named = {keys.get(name, int(name) if numbered else name): inner for name, inner in value.items()}
        kind: Any = type(present)
        return kind({key: like(present.get(key), inner) for key, inner in named.items()})
    if isinstance(value, list):
        held = (
            list(present) if isinstance(present, list | tuple) and len(present) == len(value) else [None] * len(value)
        )
        found = [like(own, inner) for own, inner in zip(held, value, strict=True)]
        return tuple(found) if isinstance(present, tuple) else found
    return value
