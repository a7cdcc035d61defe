"""Connectionist temporal classification as one operator; PyTorch's own asks for values while it is traced.

Shapes: T steps, N sequences, C classes, S labels.
"""

from typing import Any

import torch

from torch_shard._common.overrides import instead_of


@torch.library.custom_op("torch_shard::ctc", mutates_args=())
def _ctc(
    logp: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, num_labels: torch.Tensor, blank: int
) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_ctc.register_fake
def _ctc_shape(
    logp: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, num_labels: torch.Tensor, blank: int
) -> torch.Tensor:
    return logp.new_empty(logp.shape[1])


@torch.library.custom_op("torch_shard::ctc_backward", mutates_args=())
def _ctc_backward(
    grad: torch.Tensor,
    logp: torch.Tensor,
    targets: torch.Tensor,
    steps: torch.Tensor,
    num_labels: torch.Tensor,
    blank: int,
) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_ctc_backward.register_fake
def _ctc_backward_shape(grad: torch.Tensor, logp: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(logp)


class _Ctc(torch.autograd.Function):
    """Losses of the sequences: `(logp_TNC, targets_NS, steps_N, num_labels_N, blank) -> losses_N`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.blank = args[-1]
        ctx.save_for_backward(*args[:-1])
        return torch.ops.torch_shard.ctc(*args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("ctc_loss has no second derivative, as in PyTorch itself.")
        return torch.ops.torch_shard.ctc_backward(grad, *ctx.saved_tensors, ctx.blank), None, None, None, None


@instead_of(torch.nn.functional.ctc_loss, torch.ctc_loss)
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.ctc_loss`."""
    logp = log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1)
    steps, num_labels = (torch.as_tensor(x).reshape(-1).long() for x in (input_lengths, target_lengths))
    if targets.ndim == 1 and log_probs.ndim == 3:  # all labels in a row
        starts = num_labels.cumsum(0) - num_labels
        targets = targets[(starts[:, None] + torch.arange(len(targets))).clamp(max=len(targets) - 1)]
    losses = _Ctc.apply(logp, targets.reshape(logp.shape[1], -1).long(), steps, num_labels, blank)
    losses: Any = torch.where(losses.isinf(), 0.0, losses) if zero_infinity else losses
    if reduction in ("mean", 1):
        return (losses / num_labels.clamp(min=1)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if log_probs.ndim == 3 else losses.squeeze(0)
