"""Where PyTorch takes tensors without a torch function that a `Watch` could see: what stands for them goes in."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch import eager_transforms, utils, vmap

from torch_shard._watch import as_captured


@contextlib.contextmanager
def standins_given() -> Iterator[None]:
    """Let `autograd.Function` and the transforms of `torch.func` see what stands for their arguments in the capture.

    They would take a tensor that is closed over as it is: a constant, without the gradient that it has around the
    capture.
    """
    with contextlib.ExitStack() as stack:
        for module, name in _TAKE_TENSORS:
            stack.enter_context(mock.patch.object(module, name, _on_standins(getattr(module, name))))
        yield


_TAKE_TENSORS = (
    (utils, "unwrap_if_dead"),  # each tensor that an `autograd.Function` is applied to, by whatever name
    (torch.autograd.function, "custom_function_call"),  # the same within a transform
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
)


def _on_standins(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*(as_captured(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    return call
