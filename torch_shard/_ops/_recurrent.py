"""One layer of an LSTM, GRU or RNN in one direction: a loop over the steps, forward and backward.

What does not depend on the step before is one product over all steps: with the inputs (done by the caller), and in the
backward pass the gates and the gradients of the weights.

Shapes: T steps, B batch, H hidden width, G gates times H, P width of the output.
"""

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.axes import vary_like
from torch_shard._ops._registry import lowers
from torch_shard._recurrent import split_weights


def _own(h, w_hh, bias):
    product = h @ w_hh.T
    return product if bias is None else product + bias


def _lstm(pre, c):
    i, f, g, o = jnp.split(pre, 4, -1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    return i, f, g, o, f * c + i * g


def _gru(given, own):
    (given_r, given_z, given_n), (own_r, own_z, own_n) = jnp.split(given, 3, -1), jnp.split(own, 3, -1)
    r, z = jax.nn.sigmoid(given_r + own_r), jax.nn.sigmoid(given_z + own_z)
    return r, z, jnp.tanh(given_n + r * own_n), own_n


@lowers(torch.ops.torch_shard.recurrence.default)
def recurrence(kind, gates, state, weights, reverse):
    """States after each step: `[h_TBP]`, for an LSTM `[h_TBP, c_TBH]`."""
    w_hh, bias, projection = split_weights(kind, state, weights)

    def step(state, given):
        own = _own(state[0], w_hh, bias)
        if kind == "lstm":
            _, _, _, o, c = _lstm(given + own, state[1])
            h = o * jnp.tanh(c)
            state = (h if projection is None else h @ projection.T, c)
        elif kind == "gru":
            _, z, n, _ = _gru(given, own)
            state = ((state[0] - n) * z + n,)
        else:
            state = (jnp.tanh(given + own) if kind == "rnn_tanh" else jax.nn.relu(given + own),)
        return state, state

    return list(jax.lax.scan(step, vary_like(tuple(state), gates, list(weights)), gates, reverse=reverse)[1])


@lowers(torch.ops.torch_shard.recurrence_backward.default)
def recurrence_backward(kind, gates, state, weights, reverse, outputs, grads):
    """Gradients of `(gates, *state, *weights)`."""
    w_hh, bias, projection = split_weights(kind, state, weights)
    before = [_shifted(s, steps, reverse) for s, steps in zip(state, outputs, strict=True)]
    own = _own(before[0], w_hh, bias)
    back = {"lstm": _lstm_back, "gru": _gru_back}.get(kind, _rnn_back)
    factors, step = back(kind, gates, own, before, outputs, w_hh, projection)
    start = vary_like(tuple(jnp.zeros_like(s) for s in state), list(grads), factors, w_hh, projection)
    grad_state, (grad_given, grad_own, *for_projection) = jax.lax.scan(
        step, start, (tuple(grads), factors), reverse=not reverse
    )
    grad_weights = [jnp.einsum("tbg,tbp->gp", grad_own, before[0])]
    if bias is not None:
        grad_weights.append(jnp.sum(grad_own, (0, 1)))
    if projection is not None:
        grad_h, h = for_projection[0], factors[-1]
        grad_weights.append(jnp.einsum("tbp,tbh->ph", grad_h, h))
    return [grad_given, *grad_state, *grad_weights]


def _shifted(first, steps, reverse):
    """The state before each step."""
    return jnp.concatenate([steps[1:], first[None]] if reverse else [first[None], steps[:-1]])


def _lstm_back(kind, gates, own, before, outputs, w_hh, projection):
    i, f, g, o, _ = _lstm(gates + own, before[1])
    tanh = jnp.tanh(outputs[1])
    # What the gradients of h (before its projection) and of c are multiplied by, for the gates i, f, g and for o.
    by_c = jnp.concatenate([g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g)], -1)
    factors = (by_c, tanh * o * (1 - o), o * (1 - tanh * tanh), f, o * tanh)

    def step(later, given):
        (grad_h, grad_c), (by_c, by_h, h_to_c, f, _) = given
        grad_out = grad_h + later[0]
        grad_h = grad_out if projection is None else grad_out @ projection
        grad_c = grad_c + later[1] + grad_h * h_to_c
        grad = jnp.concatenate([jnp.concatenate([grad_c] * 3, -1) * by_c, grad_h * by_h], -1)
        return (grad @ w_hh, grad_c * f), (grad, grad, *(() if projection is None else (grad_out,)))

    return factors, step


def _gru_back(kind, gates, own, before, outputs, w_hh, projection):
    r, z, n, own_n = _gru(gates, own)
    factors = ((1 - z) * (1 - n * n), (before[0] - n) * z * (1 - z), own_n * r * (1 - r), r, z)

    def step(later, given):
        (grad_h,), (by_n, by_z, by_r, r, z) = given
        grad_h = grad_h + later[0]
        grad_n = grad_h * by_n
        first_two = [grad_n * by_r, grad_h * by_z]
        grad_own = jnp.concatenate([*first_two, grad_n * r], -1)
        return (grad_h * z + grad_own @ w_hh,), (jnp.concatenate([*first_two, grad_n], -1), grad_own)

    return factors, step


def _rnn_back(kind, gates, own, before, outputs, w_hh, projection):
    h = outputs[0]
    factors = (1 - h * h if kind == "rnn_tanh" else (h > 0).astype(h.dtype),)

    def step(later, given):
        (grad_h,), (factor,) = given
        grad = (grad_h + later[0]) * factor
        return (grad @ w_hh,), (grad, grad)

    return factors, step
