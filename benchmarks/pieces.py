"""Pieces of a transformer in plain JAX, in three grades; all grades of a piece are the same function.

Shapes: B batch, T length, D width, N heads, K heads of keys and values, H width of a head, V vocabulary.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

EPS = 1e-5
_SQRT_HALF = np.float32(np.sqrt(0.5))
_SQRT_TAU = np.float32(np.sqrt(2 * np.pi))


def _with_backward(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(*args) -> (value, saved)` with its hand-written `backward(saved, grad)`."""
    fn = jax.custom_vjp(lambda *args: forward(*args)[0])
    fn.defvjp(forward, backward)
    return fn


# ---- attention: (B, T, N, H) three times to the same -----------------------------------------------------------


def _causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def _dpa(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _heads_first(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *qkv: attend(*(x.swapaxes(1, 2) for x in qkv)).swapaxes(1, 2)


def _additive(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = jnp.where(_causal(q.shape[2]), 0.0, -jnp.inf)
    return jax.nn.softmax((q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2) + mask, axis=-1) @ v


def _attend_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    q = q * q.shape[-1] ** -0.5
    scores = jnp.where(_causal(q.shape[2]), q @ k.swapaxes(-1, -2), -jnp.inf)
    exps = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = exps / exps.sum(-1, keepdims=True)
    return weights @ v, (q, k, v, weights)


def _attend_backward(saved: Any, grad: jax.Array) -> Any:
    q, k, v, weights = saved
    weighted = weights * (grad @ v.swapaxes(-1, -2))
    scores = weighted - weights * weighted.sum(-1, keepdims=True)
    return scores @ k * q.shape[-1] ** -0.5, scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad


# ---- cross entropy: logits (..., V) and targets (...) to a scalar ----------------------------------------------


def _loss_optax(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _loss_forward(logits: jax.Array, targets: jax.Array) -> Any:
    chosen = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(chosen, targets[..., None], axis=-1).mean(), (chosen, targets)


def _loss_backward(saved: Any, grad: jax.Array) -> Any:
    chosen, targets = saved
    return (jnp.exp(chosen) - jax.nn.one_hot(targets, chosen.shape[-1])) * (grad / targets.size), None


# ---- gelu, exact as torch's ------------------------------------------------------------------------------------


def _gelu_nn(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_erf(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jax.lax.erf(x * _SQRT_HALF))


def _gelu_backward(x: jax.Array, grad: jax.Array) -> Any:
    return (grad * (0.5 * (1 + jax.lax.erf(x * _SQRT_HALF)) + x * jnp.exp(-0.5 * x * x) / _SQRT_TAU),)


# ---- layer norm over D -----------------------------------------------------------------------------------------


def _norm_plain(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPS)
    return normed.astype(x.dtype) * weight + bias


def _norm_var(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + EPS)
    return (x - x.mean(-1, keepdims=True)) * scale * weight + bias


def _norm_forward(x: jax.Array, weight: jax.Array, bias: jax.Array) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPS)
    normed = centred * scale
    return normed * weight + bias, (normed, scale, weight)


def _norm_backward(saved: Any, grad: jax.Array) -> Any:
    normed, scale, weight = saved
    scaled = grad * weight
    projection = (scaled * normed).mean(-1, keepdims=True)
    grad_x = (scaled - scaled.mean(-1, keepdims=True) - normed * projection) * scale
    outer = tuple(range(grad.ndim - 1))
    return grad_x, (grad * normed).sum(outer), grad.sum(outer)


# ---- embedding: (V, D) and (B, T) to (B, T, D) -----------------------------------------------------------------


def _embed_backward(saved: Any, grad: jax.Array) -> Any:
    tokens, size = saved
    chosen = jax.nn.one_hot(tokens.reshape(-1), size, axis=0)
    return chosen @ grad.reshape(-1, grad.shape[-1]), None


# ---- grades ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A choice of each piece."""

    attend: Callable[..., jax.Array] = _dpa
    cross_entropy: Callable[..., jax.Array] = _loss_optax
    gelu: Callable[..., jax.Array] = _gelu_nn
    norm: Callable[..., jax.Array] = _norm_plain
    embed: Callable[..., jax.Array] = operator.getitem


GOOD_PRACTICE = Pieces()
"""What JAX and optax offer."""

BEST_AUTODIFF = Pieces(attend=_heads_first(_additive), gelu=_gelu_erf, norm=_norm_var)
"""The fastest found on the CPU that leaves the derivative to JAX."""

BACKWARD_BY_HAND = Pieces(
    attend=_heads_first(_with_backward(_attend_forward, _attend_backward)),
    cross_entropy=_with_backward(_loss_forward, _loss_backward),
    gelu=_with_backward(lambda x: (_gelu_erf(x), x), _gelu_backward),
    norm=_with_backward(_norm_forward, _norm_backward),
    embed=_with_backward(lambda table, tokens: (table[tokens], (tokens, table.shape[0])), _embed_backward),
)
"""The fastest found, backward formulas written by hand as well."""
