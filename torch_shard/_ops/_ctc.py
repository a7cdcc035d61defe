"""Connectionist temporal classification by a loop over the steps (Graves et al. 2006).

Shapes: T steps, N sequences, C classes, S labels, L = 2 S + 1 labels with blanks around them.
"""

import jax
import jax.numpy as jnp
import torch

from torch_shard import _ctc  # noqa: F401  (defines the operators)
from torch_shard._common.axes import local_vjp, vary_like
from torch_shard._ops._registry import lowers

NEVER = -1e30  # the logarithm of no probability, finite so that its gradient is zero and not NaN


def _losses(logp, targets, steps, num_labels, blank):
    """Of each sequence; more than any real one where no path leads through."""
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
