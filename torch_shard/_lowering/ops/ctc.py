"""Connectionist temporal classification as one operator; PyTorch's own asks for values while it is traced.

Shapes: T steps, N sequences, C classes, S labels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.axes import local_vjp, vary_like
from torch_shard._common.overrides import captured_op, instead_of
from torch_shard._lowering.ops.registry import lowers


@captured_op(
    "torch_shard::ctc",
    "(Tensor logp, Tensor targets, Tensor steps, Tensor num_labels, SymInt blank) -> Tensor",
)
def _ctc_shape(logp, *_):
    return logp.new_empty(logp.shape[1])


@captured_op(
    "torch_shard::ctc_backward",
    "(Tensor grad, Tensor logp, Tensor targets, Tensor steps, Tensor num_labels, SymInt blank) -> Tensor",
)
def _ctc_backward_shape(grad, logp, *_):
    return torch.empty_like(logp)


class _Ctc(torch.autograd.Function):
    """Losses of the sequences: `(logp_TNC, targets_NS, steps_N, num_labels_N, blank) -> losses_N`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.blank = args[-1]
        ctx.save_for_backward(*args[:-1])
        return torch.ops.torch_shard.ctc(*args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("ctc_loss has no second derivative, as in PyTorch itself.")
        return torch.ops.torch_shard.ctc_backward(*grads, *ctx.saved_tensors, ctx.blank), None, None, None, None


@instead_of(torch.nn.functional.ctc_loss, torch.ctc_loss)
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
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
    losses: torch.Tensor = torch.where(losses.isinf(), 0.0, losses) if zero_infinity else losses
    if reduction in ("mean", 1):
        return (losses / num_labels.clamp(min=1)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if log_probs.ndim == 3 else losses.squeeze(0)


NEVER = -1e30  # the logarithm of no probability, finite so that its gradient is zero and not NaN


def _losses(logp, targets, steps, num_labels, blank):
    """Loss of each sequence; more than any real one where no path leads through."""
    labels = jnp.full((len(targets), 2 * targets.shape[1] + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    before = jnp.roll(labels, 2, 1).at[:, :2].set(blank)
    may_skip = (labels != blank) & (labels != before)
    here = jnp.arange(labels.shape[1])

    def step(alpha, given):
        logp_NC, t = given
        one, two = (jnp.where(here >= n, jnp.roll(alpha, n, 1), NEVER) for n in (1, 2))
        arrived = jnp.logaddexp(jnp.logaddexp(alpha, one), jnp.where(may_skip, two, NEVER))
        own = jnp.take_along_axis(logp_NC, labels, 1)
        return jnp.where((t < steps)[:, None], arrived + own, alpha), None

    start = jnp.broadcast_to(jnp.where(here == 0, 0.0, NEVER).astype(logp.dtype), labels.shape)
    first = jnp.where(here < 2, jnp.take_along_axis(logp[0], labels, 1), NEVER)
    alpha = jnp.where((steps > 0)[:, None], first, start)
    alpha, _ = jax.lax.scan(step, vary_like(alpha, logp, targets, steps), (logp[1:], jnp.arange(1, len(logp))))
    blank_last = jnp.take_along_axis(alpha, 2 * num_labels[:, None], 1)[:, 0]
    label_last = jnp.take_along_axis(alpha, jnp.maximum(2 * num_labels[:, None] - 1, 0), 1)[:, 0]
    return -jnp.logaddexp(blank_last, jnp.where(num_labels > 0, label_last, NEVER))


def _is_impossible(losses):
    return losses > -NEVER / 2


@lowers(torch.ops.torch_shard.ctc.default)
def ctc(logp, targets, steps, num_labels, blank):
    losses = _losses(logp, targets, steps, num_labels, blank)
    return jnp.where(_is_impossible(losses), jnp.inf, losses)


@lowers(torch.ops.torch_shard.ctc_backward.default)
def ctc_backward(grad, logp, targets, steps, num_labels, blank):
    """PyTorch's gradient, which is that of a log-softmax's input: it adds the probabilities of the steps in use."""
    losses, (own,) = local_vjp(lambda logp: _losses(logp, targets, steps, num_labels, blank), logp, cotangent=grad)
    used = jnp.arange(len(logp))[:, None, None] < steps[:, None]
    found = own + jnp.where(used, jnp.exp(logp) * grad[:, None], 0)
    impossible = jnp.where(grad == 0, 0.0, jnp.nan)[:, None]
    return jnp.where(_is_impossible(losses)[:, None], impossible, found)
