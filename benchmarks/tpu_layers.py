"""Pieces of the hand-written models for TPUs, for one device each: what a careful JAX user writes in `jax.shard_map`.

Shapes: B rows of the batch, T time, D model, N heads, K heads of keys, H of one head, V words; all local.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

EPS = 1e-5
BLOCK = 512
"""Of the attention kernel, rows and columns."""


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All of `dim`; its derivative is scattered as it is summed."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The sum over devices, of which each keeps its part of `dim`."""
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def causal_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    interpret: bool = False,
    *,
    window: int | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """JAX's splash attention; within a window and beside sinks, if any."""
    given = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    return heads_first_attention(*given, interpret, window=window, sinks_N=sinks_N).swapaxes(1, 2)


def heads_first_attention(
    q_BNTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    interpret: bool,
    *,
    window: int | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """The same, as the kernel takes it."""
    shape = (q_BNTH.shape[2],) * 2
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = _kernel(mask, q_BNTH.shape[1], interpret)
    with jax.default_matmul_precision("default"):  # Mosaic knows no other
        run = jax.vmap(lambda q, k, v: kernel(q, k, v, None, sinks_N))
        return run(q_BNTH * q_BNTH.shape[-1] ** -0.5, k_BKTH, v_BKTH)


def _kernel(mask: Any, heads: int, interpret: bool) -> Any:
    block = min(BLOCK, mask.shape[0])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return splash.make_splash_mha_single_device(
        mask=splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        interpret=interpret,
    )


@jax.checkpoint
def written_attention(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> jax.Array:
    """Each sees all, written out, for rows too short for a kernel; the backward pass has q, k and v alone."""
    scores = jnp.einsum("bqnh,bknh->bnqk", q_BTNH * q_BTNH.shape[-1] ** -0.5, k_BTNH)
    shares = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v_BTNH.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", shares, v_BTNH)


def rotate(x_BTNH: jax.Array, base: float, places_T: jax.Array | None = None) -> jax.Array:
    """Rotary positions, halves as in HF's models; places are those of all time, in order, if not said."""
    half = x_BTNH.shape[-1] // 2
    places = np.arange(x_BTNH.shape[1]) if places_T is None else places_T
    angles = places[:, None] * base ** (-np.arange(half) / half)
    own = np if places_T is None else jnp
    cos, sin = (jnp.asarray(f(angles)[:, None], x_BTNH.dtype) for f in (own.cos, own.sin))
    a, b = jnp.split(x_BTNH, 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


@jax.checkpoint
def rms_norm(x_BTD: jax.Array, weight_D: jax.Array) -> jax.Array:
    """In float32 inside; the backward pass has the narrow input alone."""
    wide = x_BTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPS)
    return (wide * scale * weight_D).astype(x_BTD.dtype)


@jax.checkpoint
def layer_norm(x_BTD: jax.Array, weight_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """In float32 inside; the backward pass has the narrow input alone."""
    wide = x_BTD.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPS)
    return (centred * scale * weight_D + bias_D).astype(x_BTD.dtype)


@jax.checkpoint
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The inner part of a gated MLP."""
    return jax.nn.silu(gate) * up


def embed(table_VD: jax.Array, tokens_BT: jax.Array, axis: str) -> jax.Array:
    """Rows of a table whose words are split over `axis`; each device keeps its part of the time."""
    places = tokens_BT - jax.lax.axis_index(axis) * table_VD.shape[0]
    own = (places >= 0) & (places < table_VD.shape[0])
    rows = jnp.where(own[..., None], table_VD[jnp.where(own, places, 0)], 0)
    return scatter(rows, axis, 1)


def next_token_loss(logits_BTV: jax.Array, tokens_BT: jax.Array, words: str | None) -> jax.Array:
    """Cross entropy of each next token, summed; the last has none. Words are split over the axis `words`, if any."""
    losses_BT = token_losses(logits_BTV, jnp.roll(tokens_BT, -1, axis=1), words)
    return losses_BT[:, :-1].sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_losses(logits: jax.Array, targets: jax.Array, words: str | None) -> jax.Array:
    """Each `-log softmax` at its target, in float32 inside; the backward pass has narrow logits and a norm a token."""
    return _forward(logits, targets, words)[0]


def _forward(logits: jax.Array, targets: jax.Array, words: str | None) -> Any:
    most = logits.max(-1).astype(jnp.float32)
    most = most if words is None else jax.lax.pmax(most, words)
    wide = logits.astype(jnp.float32)
    norm = jnp.log(_total(jnp.exp(wide - most[..., None]).sum(-1), words)) + most
    chosen = _total(jnp.where(_is_target(logits, targets, words), wide, 0).sum(-1), words)
    return norm - chosen, (logits, targets, norm)


def _backward(words: str | None, saved: Any, grad: jax.Array) -> Any:
    logits, targets, norm = saved
    softmax = jnp.exp(logits.astype(jnp.float32) - norm[..., None])
    grads = (softmax - _is_target(logits, targets, words)) * _total(grad, words)[..., None]
    return grads.astype(logits.dtype), None


token_losses.defvjp(_forward, _backward)


def _total(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


def _is_target(logits: jax.Array, targets: jax.Array, words: str | None) -> jax.Array:
    first = 0 if words is None else jax.lax.axis_index(words) * logits.shape[-1]
    return first + jnp.arange(logits.shape[-1]) == targets[..., None]
