"""ResNets for TPUs by hand: data parallel, channels last, bfloat16 arithmetic, statistics over the whole batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Rival, Values

EPS, MOMENTUM = 1e-5, 0.1


@dataclasses.dataclass(frozen=True)
class ResNet:
    """Sizes, as in HF's config."""

    stem: int = 64
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000
    dtype: Any = jnp.bfloat16
    basic: bool = False
    """Layers of two convolutions of 3 x 3, as ResNet-18 and 34 have them."""

    @property
    def convolutions(self) -> tuple[tuple[str, int, int], ...]:
        """Of each layer: name, size of the kernel, and the width of the layer over that of its result."""
        return (("in", 3, 1), ("out", 3, 1)) if self.basic else (("in", 1, 4), ("mid", 3, 4), ("out", 1, 1))

    def skips(self, stage: int, layer: int) -> bool:
        """Whether the sum has another convolution of what the layer is given: where width or stride change."""
        return layer == 0 and (stage > 0 or self.widths[0] != self.stem)

    @property
    def _kernels(self) -> dict[str, tuple[int, int, int]]:
        """Size, input and output channels of each convolution."""
        found, ins = {"stem": (7, 3, self.stem)}, self.stem
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            for layer in range(depth):
                name = f"{stage}.{layer}"
                found |= {f"{name}.skip": (1, ins, width)} if self.skips(stage, layer) else {}
                for convolution, size, narrower in self.convolutions:
                    found[f"{name}.{convolution}"] = (size, ins, width // narrower)
                    ins = width // narrower
        return found

    @property
    def start(self) -> Values:
        """Shapes of the parameters, kernels (Y, X, in, out), and of the running statistics."""
        params: dict[str, tuple[int, ...]] = {"head": (self.widths[-1], self.classes), "head.bias": (self.classes,)}
        buffers: dict[str, tuple[int, ...]] = {}
        for name, (size, ins, outs) in self._kernels.items():
            params |= {name: (size, size, ins, outs), f"{name}.scale": (outs,), f"{name}.bias": (outs,)}
            buffers |= {f"{name}.mean": (outs,), f"{name}.var": (outs,)}
        held: Any = [{n: jax.ShapeDtypeStruct(s, np.float32) for n, s in part.items()} for part in (params, buffers)]
        return Values(*held, dict.fromkeys((*params, *buffers), P()))

    def rival(self, mesh: Mesh) -> Rival:
        """One jit, in which XLA splits the batch over any mesh."""
        return Rival(functools.partial(_loss, self))


BASIC = ResNet(widths=(64, 128, 256, 512), depths=(2, 2, 2, 2), basic=True)
"""ResNet-18."""


def _loss(sizes: ResNet, params: Arrays, buffers: Arrays, batch: Any) -> Any:
    x, classes = batch
    kept: Arrays = {}
    layer = functools.partial(_layer, params, buffers, kept)
    x = jax.nn.relu(layer("stem", x.astype(sizes.dtype), 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for stage, depth in enumerate(sizes.depths):
        for number in range(depth):
            name, stride, strided = f"{stage}.{number}", 2 if stage and not number else 1, sizes.convolutions[-2][0]
            y, skip = x, layer(f"{name}.skip", x, stride) if sizes.skips(stage, number) else x
            for convolution, *_ in sizes.convolutions[:-1]:
                y = jax.nn.relu(layer(f"{name}.{convolution}", y, stride if convolution == strided else 1))
            x = jax.nn.relu(layer(f"{name}.out", y) + skip)
    pooled = x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)
    logits = pooled @ params["head"].astype(x.dtype) + params["head.bias"].astype(x.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), classes).mean(), kept


def _layer(params: Arrays, buffers: Arrays, kept: Arrays, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution and batch norm, whose statistics are float32."""
    kernel = params[name].astype(x.dtype)
    pad = [(kernel.shape[0] // 2,) * 2] * 2
    x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), pad, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    wide, count = x.astype(jnp.float32), x.size // x.shape[-1]
    mean = wide.mean((0, 1, 2))
    var = jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean)
    for key, new in (("mean", mean), ("var", var * (count / (count - 1)))):
        kept[f"{name}.{key}"] = (1 - MOMENTUM) * buffers[f"{name}.{key}"] + MOMENTUM * new
    scale = jax.lax.rsqrt(var + EPS) * params[f"{name}.scale"]
    return (wide * scale + (params[f"{name}.bias"] - mean * scale)).astype(x.dtype)
