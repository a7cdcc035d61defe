"""What eager torch on the CPU makes of a state of a step and a batch: the reference of all proofs."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import torch
from torch import nn

from torch_shard._capture import MetricCalls, Precision
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._loss import split_loss
from torch_shard._lowering import world_of_one
from torch_shard._train.comparison import Difference, Values, array_of
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.step import Step

logger = logging.getLogger(__name__)


def like_model(copy: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, with the training flags and gradient hooks that the model has."""
    for mine, theirs in zip(copy.modules(), model.modules(), strict=True):
        mine.training = theirs.training
    for name, parameter in model.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            copy.get_parameter(name).register_hook(hook)  # which a copy loses
    return copy


def host_batch(arrays: Sequence[jax.Array], placed: ShardedBatch) -> list[torch.Tensor]:
    """The leaves of a batch on the mesh as torch has them: JAX may hold 64 bits in 32."""
    return [to_cpu(array).to(spec.dtype) for array, spec in zip(arrays, placed.signature.specs, strict=True)]


def in_float64(
    step: Step,
    model: nn.Module,
    batches: Sequence[PyTree],
    compare: Callable[[nn.Module, list[PyTree]], Sequence[Difference]],
) -> dict[tuple[str, str], float]:
    """Differences by kind and name where a model and its batches are repeated in float64; empty where they cannot be.

    Args:
        step: In float32.
        model: The model on the CPU with the values of a state of the step.
        batches: Of the step.
        compare: Gives the differences for a model and batches in float64.
    """
    try:
        with jax.enable_x64(True):
            wide = list[PyTree]()
            for batch in batches:
                placed = batch if isinstance(batch, ShardedBatch) else step.put(batch)
                tensors = host_batch(placed.arrays, placed)
                wide.append(placed.signature.rebuild([t.double() if t.dtype == torch.float32 else t for t in tensors]))
            rows = compare(model.double(), wide)
            return {(row.kind, row.name): row.mesh for row in rows}
    except Exception:
        logger.info("The loss cannot be repeated in float64.", exc_info=True)
        return {}


def eager_loss(
    step: Step, model: nn.Module, batch: PyTree, precision: Precision | None = None
) -> tuple[torch.Tensor, dict[str, PyTree]]:
    """The loss and the metrics of a batch, in the precision of the step or in another one."""
    with (precision or step.options.precision).active("cpu"), MetricCalls().noted(), world_of_one():
        return split_loss(step.loss_fn(model, batch))


def eager_gradients(model: nn.Module, names: Mapping[str, object]) -> Values:
    """What `.grad` holds, for these names; zeros where there is none."""
    held = {name: model.get_parameter(name) for name in names}
    return {("gradient", name): array_of(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in held.items()}
