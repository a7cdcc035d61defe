"""Modules within the wrappers of PyTorch: `torch.compile`, `DistributedDataParallel` and `DataParallel`."""

import sys
from typing import Any, cast

from torch import nn

from torch_shard._common.validate import check_kind


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that wrappers run, itself without one: names are its own, without `module.` and `_orig_mod.`."""
    inner: Any = module
    while (held := _held_by(inner)) is not None:
        inner = held
    return inner


def check_module(argument: str, value: nn.Module) -> nn.Module:
    """Refuse what is not a module; gives it without wrappers."""
    check_kind(argument, value, nn.Module)
    return unwrapped(value)


def _held_by(module: Any) -> nn.Module | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return cast(nn.Module, module.module)  # pyright: ignore[reportUnknownMemberType]
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # its import takes seconds
    return module._orig_mod if compiled is not None and isinstance(module, compiled) else None
