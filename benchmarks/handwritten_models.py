"""The models of `benchmarks.models` by hand in plain JAX."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.handwritten import Arrays, Layout, Rival
from benchmarks.pieces import GOOD_PRACTICE, Pieces

EPS = 1e-5
Body = Callable[[jax.Array, Arrays], jax.Array]


def _in_out(name: str, ndim: int) -> tuple[int, ...] | None:
    """Weights of linear layers as `(in, out)`, as JAX people store them."""
    is_linear = ndim == 2 and name.split(".")[-2] not in ("tok", "pos")
    return (1, 0) if is_linear else None


def _layout(scan: bool, in_out: bool) -> Layout:
    return Layout(turn=_in_out if in_out else lambda name, ndim: None, stacked="h." if scan else None)


def _linear(in_out: bool) -> Callable[[Arrays, str, jax.Array], jax.Array]:
    def linear(p: Arrays, name: str, x: jax.Array) -> jax.Array:
        weight = p[f"{name}.weight"]
        out = x @ (weight if in_out else weight.T)
        return out + p[f"{name}.bias"] if f"{name}.bias" in p else out

    return linear


def _through_layers(block: Body, x: jax.Array, params: Arrays, scan: bool) -> jax.Array:
    layers = {n[2:]: v for n, v in params.items() if n.startswith("h.")}
    if scan:
        return jax.lax.scan(lambda x, p: (block(x, p), None), x, layers)[0]
    for _, names in itertools.groupby(layers, lambda name: name.partition(".")[0]):
        x = block(x, {name.partition(".")[2]: layers[name] for name in names})
    return x


def gpt(
    heads: int,
    pieces: Pieces = GOOD_PRACTICE,
    scan: bool = True,
    in_out: bool = True,
    dtype: Any = None,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Rival:
    """The GPT; `constrain` says how activations between blocks are split, where XLA should not choose."""
    linear, norm = _linear(in_out), pieces.norm

    def block(x: jax.Array, p: Arrays) -> jax.Array:
        y = norm(x, p["ln1.weight"], p["ln1.bias"])
        q, k, v = (linear(p, n, y).reshape(*y.shape[:2], heads, -1) for n in "qkv")
        x = constrain(x + linear(p, "o", pieces.attend(q, k, v).reshape(y.shape)))
        y = norm(x, p["ln2.weight"], p["ln2.bias"])
        return constrain(x + linear(p, "down", pieces.gelu(linear(p, "up", y))))

    def loss(params: Arrays, buffers: Arrays, batch: Any) -> Any:
        tokens, targets = batch
        x = pieces.embed(params["tok.weight"], tokens) + params["pos.weight"][: tokens.shape[1]]
        x = _through_layers(block, constrain(x), params, scan)
        logits = norm(x, params["ln.weight"], params["ln.bias"]) @ params["tok.weight"].T
        return pieces.cross_entropy(logits.astype(jnp.float32), targets), buffers

    return Rival(loss, _layout(scan, in_out), dtype)


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + EPS)
    return (x * scale).astype(x.dtype) * weight


def rotate(x: jax.Array) -> jax.Array:
    """`(B, T, N, H)`."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angles)[:, None], x.dtype) for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def llama(
    heads: int, kv_heads: int, pieces: Pieces = GOOD_PRACTICE, scan: bool = True, in_out: bool = True, dtype: Any = None
) -> Rival:
    """The Llama."""
    linear = _linear(in_out)

    def block(x: jax.Array, p: Arrays) -> jax.Array:
        y = _rms_norm(x, p["ln1.weight"])
        q = rotate(linear(p, "q", y).reshape(*y.shape[:2], heads, -1))
        k, v = (linear(p, n, y).reshape(*y.shape[:2], kv_heads, -1) for n in "kv")
        x = x + linear(p, "o", pieces.attend(q, rotate(k), v).reshape(y.shape))
        y = _rms_norm(x, p["ln2.weight"])
        return x + linear(p, "down", jax.nn.silu(linear(p, "gate", y)) * linear(p, "up", y))

    def loss(params: Arrays, buffers: Arrays, batch: Any) -> Any:
        tokens, targets = batch
        x = _through_layers(block, pieces.embed(params["tok.weight"], tokens), params, scan)
        logits = linear(params, "head", _rms_norm(x, params["ln.weight"]))
        return pieces.cross_entropy(logits.astype(jnp.float32), targets), buffers

    return Rival(loss, _layout(scan, in_out), dtype)


def mlp(in_out: bool = True) -> Rival:
    """The MLP, whose linear layers are numbered as in `nn.Sequential`."""
    linear = _linear(in_out)

    def loss(params: Arrays, buffers: Arrays, batch: Any) -> Any:
        x, classes = batch
        numbers = sorted({int(n.split(".")[0]) for n in params})
        for number in numbers:
            x = linear(params, str(number), x)
            x = jax.nn.relu(x) if number != numbers[-1] else x
        return GOOD_PRACTICE.cross_entropy(x, classes), buffers

    return Rival(loss, _layout(scan=False, in_out=in_out))


def resnet(pieces: Pieces = GOOD_PRACTICE) -> Rival:
    """The ResNet, channels last, kernels `(Y, X, in, out)`; it keeps running statistics as torch does."""

    def conv(p: Arrays, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        kernel = p[f"{name}.weight"]
        pad = kernel.shape[0] // 2
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def batch_norm(p: Arrays, buffers: Arrays, name: str, x: jax.Array) -> jax.Array:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        count = x.size // x.shape[-1]
        for key, new in (("mean", mean), ("var", var * (count / (count - 1)))):
            buffers[f"{name}.running_{key}"] = 0.9 * buffers[f"{name}.running_{key}"] + 0.1 * new
        return (x - mean) * (jax.lax.rsqrt(var + EPS) * p[f"{name}.weight"]) + p[f"{name}.bias"]

    def residual(p: Arrays, buffers: Arrays, name: str, x: jax.Array) -> jax.Array:
        stride = 2 if f"{name}.skip.0.weight" in p else 1
        y = jax.nn.relu(batch_norm(p, buffers, f"{name}.bn1", conv(p, f"{name}.conv1", x, stride)))
        y = batch_norm(p, buffers, f"{name}.bn2", conv(p, f"{name}.conv2", y))
        if stride == 2:
            x = batch_norm(p, buffers, f"{name}.skip.1", conv(p, f"{name}.skip.0", x, stride))
        return jax.nn.relu(y + x)

    def loss(params: Arrays, buffers: Arrays, batch: Any) -> Any:
        x, classes = batch
        buffers = dict(buffers)
        x = jax.nn.relu(batch_norm(params, buffers, "bn", conv(params, "stem", x.transpose(0, 2, 3, 1))))
        for i in range(1 + max(int(n.split(".")[1]) for n in params if n.startswith("blocks."))):
            x = residual(params, buffers, f"blocks.{i}", x)
        logits = x.mean((1, 2)) @ params["head.weight"] + params["head.bias"]
        return pieces.cross_entropy(logits, classes), buffers

    turns = {4: (2, 3, 1, 0), 2: (1, 0)}
    return Rival(loss, Layout(turn=lambda name, ndim: turns.get(ndim)))
