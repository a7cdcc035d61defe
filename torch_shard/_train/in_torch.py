"""What eager torch on the CPU makes of a state of a step and a batch: the reference of all proofs."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_shard._common.types import PyTree
from torch_shard._train.comparison import Values, array_of
from torch_shard._train.loss_result import split_loss
from torch_shard._train.state import TrainState

if TYPE_CHECKING:
    from torch_shard._train.train_step import TrainStep


def eager_copy(step: "TrainStep", state: TrainState) -> nn.Module:
    """The model on the CPU with the values of a state, and with the training flags and gradient hooks that it has."""
    model = step.export(state)
    for mine, theirs in zip(model.modules(), step.model.modules(), strict=True):
        mine.training = theirs.training
    for name, parameter in step.model.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            model.get_parameter(name).register_hook(hook)  # which a copy loses
    return model


def eager_loss(step: "TrainStep", model: nn.Module, batch: PyTree) -> tuple[torch.Tensor, dict[str, PyTree]]:
    """The loss and the metrics of a batch."""
    dtype = step.options.compute_dtype
    with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        return split_loss(step.loss_fn(model, batch))


def eager_gradients(model: nn.Module, names: Mapping[str, object]) -> Values:
    """What `.grad` holds, for these names; zeros where there is none."""
    held = {name: model.get_parameter(name) for name in names}
    return {("gradient", name): array_of(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in held.items()}
