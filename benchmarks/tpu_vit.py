"""A ViT for TPUs by hand: FSDP and tensor parallel (Megatron's sums), bfloat16 arithmetic, patches as a product.

Shapes: as in `tpu_layers`; T patches and one token for the class.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Rival, Values
from benchmarks.tpu_layers import gather, layer_norm, written_attention
from benchmarks.tpu_llama import IN_OUT, OUT_IN


@dataclasses.dataclass(frozen=True)
class Vit:
    """Sizes, as in HF's config."""

    layers: int = 4
    width: int = 768
    hidden: int = 3072
    heads: int = 12
    image: int = 224
    patch: int = 16
    classes: int = 1000
    dtype: Any = jnp.bfloat16

    @property
    def _entries(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Shape and spec of each parameter, weights (in, out)."""
        d, f, pixels, side = self.width, self.hidden, 3 * self.patch**2, self.image // self.patch
        found: dict[str, tuple[tuple[int, ...], P]] = {
            "patch": ((pixels, d), P("batch")),
            "patch.bias": ((d,), P()),
            "cls": ((d,), P()),
            "pos": ((side**2 + 1, d), P()),
            "head": ((d, self.classes), P("batch")),
            "head.bias": ((self.classes,), P()),
            "ln": ((d,), P()),
            "ln.bias": ((d,), P()),
        }
        for layer in range(self.layers):
            own = {n: ((d, d), IN_OUT, P("model")) for n in "qkv"} | {"o": ((d, d), OUT_IN, P())}
            own |= {"up": ((d, f), IN_OUT, P("model")), "down": ((f, d), OUT_IN, P())}
            for name, (shape, spec, of_bias) in own.items():
                found |= {f"h.{layer}.{name}": (shape, spec), f"h.{layer}.{name}.bias": (shape[1:], of_bias)}
            found |= {f"h.{layer}.{ln}{part}": ((d,), P()) for ln in ("ln1", "ln2") for part in ("", ".bias")}
        return found

    @property
    def specs(self) -> dict[str, P]:
        """Of each parameter."""
        return {name: spec for name, (_, spec) in self._entries.items()}

    @property
    def start(self) -> Values:
        """Shapes of the parameters."""
        return Values.of_shapes({name: shape for name, (shape, _) in self._entries.items()}, self.specs)

    def rival(self, mesh: Mesh) -> Rival:
        """Float32 parameters, narrow arithmetic."""
        in_specs = (self.specs, P("batch"), P("batch"))
        sharded = jax.shard_map(
            functools.partial(_loss, self), mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False
        )
        return Rival(lambda params, buffers, batch: (sharded(params, *batch), buffers))

    def whole(self, weight: jax.Array, dim: int = 0) -> jax.Array:
        """What FSDP has split, gathered narrow."""
        return gather(weight.astype(self.dtype), "batch", dim)


def _loss(sizes: Vit, params: Arrays, pixels: jax.Array, classes: jax.Array) -> jax.Array:
    x = _embed(sizes, params, pixels)
    for layer in range(sizes.layers):
        prefix = f"h.{layer}."
        x = _block(sizes, x, {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)})
    x = layer_norm(x[:, 0], params["ln"], params["ln.bias"])
    logits = x @ sizes.whole(params["head"]) + params["head.bias"].astype(x.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), classes)
    return jax.lax.pmean(losses.mean(), "batch")


def _embed(sizes: Vit, params: Arrays, pixels_BCYX: jax.Array) -> jax.Array:
    """Patches through one product, behind the token of the class."""
    kernel = sizes.whole(params["patch"]).reshape(3, sizes.patch, sizes.patch, -1)
    x = pixels_BCYX.astype(sizes.dtype)
    steps = (sizes.patch, sizes.patch)
    x_BYXD = jax.lax.conv_general_dilated(x, kernel, steps, "VALID", dimension_numbers=("NCHW", "IHWO", "NHWC"))
    x_BTD = x_BYXD.reshape(len(x), -1, sizes.width) + params["patch.bias"].astype(x.dtype)
    cls = jnp.broadcast_to(params["cls"].astype(x.dtype), (len(x), 1, sizes.width))
    return jnp.concatenate((cls, x_BTD), 1) + params["pos"].astype(x.dtype)


def _block(sizes: Vit, x: jax.Array, p: Arrays) -> jax.Array:
    """One layer; its two sums over `model` give each device all features."""
    narrow = {name: value.astype(x.dtype) for name, value in p.items() if name.endswith(".bias") and "ln" not in name}
    y = layer_norm(x, p["ln1"], p["ln1.bias"])
    width = sizes.width // sizes.heads
    q, k, v = (y @ sizes.whole(p[n]) + narrow[f"{n}.bias"] for n in "qkv")
    q, k, v = (part.reshape(*y.shape[:2], -1, width) for part in (q, k, v))
    out = written_attention(q, k, v)
    out = out.reshape(*y.shape[:2], -1) @ sizes.whole(p["o"], 1)
    x = x + jax.lax.psum(out, "model") + narrow["o.bias"]
    y = layer_norm(x, p["ln2"], p["ln2.bias"])
    inner = _gelu(y @ sizes.whole(p["up"]) + narrow["up.bias"])
    return x + jax.lax.psum(inner @ sizes.whole(p["down"], 1), "model") + narrow["down.bias"]


_gelu = jax.checkpoint(functools.partial(jax.nn.gelu, approximate=False))
