"""Batch norms with `momentum=None`, whose forward would read its counter as a Python number."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def cumulative_batch_norms() -> Iterator[None]:
    """Run them within on tensors alone.

    Such a norm keeps the plain mean of all its batches: after batch n, `(1 - 1/n) * old + 1/n * new`. With momentum 1
    its forward leaves `new` in the buffers, and the mean is taken after it.
    """
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if isinstance(module, _BatchNorm) and module.momentum is None and module.training and _tracks(module):
            before[id(module)] = _running(module)[0].clone(), _running(module)[1].clone()
            module.momentum = 1.0

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        old = before.pop(id(module), None)
        if old is None:
            return
        module.momentum = None  # pyright: ignore[reportArgumentType]
        count: Any = module.num_batches_tracked
        with torch.no_grad():
            for running, mean in zip(_running(module), old, strict=True):
                # .data: the norm's backward, which has no use for them, has noted their version
                running.data.copy_(mean + (running - mean) / count)

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tracks(module: _BatchNorm) -> bool:
    return module.running_mean is not None and module.num_batches_tracked is not None


def _running(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return module.running_mean, module.running_var
