"""The models of `benchmarks.models` in Flax NNX, trained with optax as its performance guide has it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from benchmarks import models
from benchmarks.handwritten_models import rotate
from benchmarks.sides import LEARNING_RATE, Side

RNGS = nnx.Rngs(0)  # the values are torch's


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Block(nnx.Module):
    """As `models.Block`, with separate q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        self.heads = heads
        self.ln1, self.ln2 = (nnx.LayerNorm(width, epsilon=1e-5, rngs=RNGS) for _ in range(2))
        self.q, self.k, self.v, self.o = (nnx.Linear(width, width, rngs=RNGS) for _ in range(4))
        self.up = nnx.Linear(width, 4 * width, rngs=RNGS)
        self.down = nnx.Linear(4 * width, width, rngs=RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.ln1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        x = x + self.o(_attend(q, k, v).reshape(y.shape))
        return x + self.down(nnx.gelu(self.up(self.ln2(x)), approximate=False))


class GPT(nnx.Module):
    """As `models.GPT`."""

    def __init__(self, twin: models.GPT) -> None:
        (vocab, width), length = twin.tok.weight.shape, len(twin.pos.weight)
        self.tok, self.pos = (nnx.Embed(n, width, rngs=RNGS) for n in (vocab, length))
        self.h = nnx.List([Block(width, twin.heads) for _ in twin.h])
        self.ln = nnx.LayerNorm(width, epsilon=1e-5, rngs=RNGS)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tok(tokens) + self.pos(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.tok.attend(self.ln(x))


class LlamaBlock(nnx.Module):
    """As `models.LlamaBlock`."""

    def __init__(self, twin: models.LlamaBlock) -> None:
        def linear(like: torch.nn.Linear) -> nnx.Linear:
            return nnx.Linear(like.in_features, like.out_features, use_bias=False, rngs=RNGS)

        self.heads, self.kv_heads = twin.heads, twin.kv_heads
        width = twin.q.in_features
        self.ln1, self.ln2 = (nnx.RMSNorm(width, epsilon=1e-5, rngs=RNGS) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(f) for f in (twin.q, twin.k, twin.v, twin.o))
        self.gate, self.up, self.down = (linear(f) for f in (twin.gate, twin.up, twin.down))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.ln1(x)
        q = rotate(self.q(y).reshape(*y.shape[:2], self.heads, -1))
        k, v = (f(y).reshape(*y.shape[:2], self.kv_heads, -1) for f in (self.k, self.v))
        x = x + self.o(_attend(q, rotate(k), v).reshape(y.shape))
        y = self.ln2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """As `models.Llama`."""

    def __init__(self, twin: models.Llama) -> None:
        vocab, width = twin.tok.weight.shape
        self.tok = nnx.Embed(vocab, width, rngs=RNGS)
        self.h = nnx.List([LlamaBlock(block) for block in twin.h])
        self.ln = nnx.RMSNorm(width, epsilon=1e-5, rngs=RNGS)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=RNGS)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tok(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def _conv(like: torch.nn.Conv2d) -> nnx.Conv:
    return nnx.Conv(
        like.in_channels,
        like.out_channels,
        kernel_size=like.kernel_size,
        strides=like.stride,
        padding=[(p, p) for p in like.padding],
        use_bias=False,
        rngs=RNGS,
    )


def _batch_norm(like: torch.nn.BatchNorm2d) -> nnx.BatchNorm:
    return nnx.BatchNorm(like.num_features, momentum=0.9, epsilon=1e-5, rngs=RNGS)


class Residual(nnx.Module):
    """As `models.Residual`."""

    def __init__(self, twin: models.Residual) -> None:
        self.conv1, self.conv2 = _conv(twin.conv1), _conv(twin.conv2)
        self.bn1, self.bn2 = _batch_norm(twin.bn1), _batch_norm(twin.bn2)
        self.skip = None if twin.skip is None else nnx.List([_conv(twin.skip[0]), _batch_norm(twin.skip[1])])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + (x if self.skip is None else self.skip[1](self.skip[0](x))))


class ResNet(nnx.Module):
    """As `models.ResNet`; pictures come channels first."""

    def __init__(self, twin: models.ResNet) -> None:
        self.stem, self.bn = _conv(twin.stem), _batch_norm(twin.bn)
        self.blocks = nnx.List([Residual(block) for block in twin.blocks])
        self.head = nnx.Linear(twin.head.in_features, 10, rngs=RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.bn(self.stem(x.transpose(0, 2, 3, 1))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class MLP(nnx.Module):
    """As `models.mlp`; `layers` has None in place of each relu, so that numbers are those of `nn.Sequential`."""

    def __init__(self, twin: torch.nn.Sequential) -> None:
        linear = [f for f in twin if isinstance(f, torch.nn.Linear)]
        self.layers = nnx.List([nnx.Linear(f.in_features, f.out_features, rngs=RNGS) for f in linear])

    def __call__(self, x: jax.Array) -> jax.Array:
        *rest, last = self.layers
        for layer in rest:
            x = nnx.relu(layer(x))
        return last(x)


TWINS: dict[type, Callable[[Any], nnx.Module]] = {
    models.GPT: GPT,
    models.Llama: Llama,
    models.ResNet: ResNet,
    torch.nn.Sequential: MLP,
}
_TURNS = {4: (2, 3, 1, 0), 2: (1, 0)}


def _load(module: nnx.Module, twin: torch.nn.Module) -> None:
    """Give an NNX module the values of its torch twin: by name, `kernel`, `scale`, `mean` and `var` renamed."""
    values = {n: t.detach().numpy() for n, t in twin.state_dict().items()}
    renamed = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        *owner, leaf = (str(part) for part in path)
        if owner[0] == "layers":
            owner = [str(2 * int(owner[1]))]
        value = values[".".join([*owner, {**renamed, "embedding": "weight"}.get(leaf, leaf)])]
        turned = value.transpose(_TURNS[value.ndim]) if leaf == "kernel" else value
        assert turned.shape == variable.shape, (path, turned.shape, variable.shape)
        variable.set_value(jnp.asarray(np.ascontiguousarray(turned)))


def flax_nnx(twin: torch.nn.Module) -> Side:
    """The NNX twin of a torch model: split once, one donated `jax.jit`, merged within."""
    model = TWINS[type(twin)](twin)
    _load(model, twin)
    optimizer = nnx.Optimizer(model, optax.adamw(LEARNING_RATE), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    jitted = jax.jit(train_step, donate_argnums=0)
    held = [state]

    def step(batch: Any) -> float:
        arrays = tuple(jax.device_put(t.numpy()) for t in batch)
        held[0], loss = jitted(held[0], arrays)
        return float(jax.block_until_ready((held[0], loss))[1])

    return step
