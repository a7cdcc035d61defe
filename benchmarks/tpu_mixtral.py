"""A Mixtral for TPUs by hand: as the Llama, with experts over `model` and JAX's grouped products on each device.

Shapes: S tokens of all devices of `model`, R of these twice, once for each of their experts, F hidden.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Values
from benchmarks.tpu_layers import gated, gather, rms_norm, scatter
from benchmarks.tpu_llama import Llama, attend

EXPERTS = P(None, "model", "batch")
TILES = (512, 1024, 1024)
"""Of the grouped products: rows, inputs, outputs."""
CHOSEN = 2


@dataclasses.dataclass(frozen=True)
class Mixtral(Llama):
    """Sizes, as in HF's config, and how it is trained."""

    layers: int = 2
    width: int = 1024
    hidden: int = 3584
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 32000
    base: float = 1e6
    experts: int = 8

    @property
    def specs(self) -> dict[str, P]:
        """The experts' first dim is over `model`, which need not split anything within."""
        return super().specs | {"h.gate": P(), "h.up": EXPERTS, "h.down": EXPERTS}

    @property
    def start(self) -> Values:
        """`up` holds the gate, too; `gate` is the router."""
        n, d, f, e = self.layers, self.width, self.hidden, self.experts
        shapes = {"h.gate": (n, d, e), "h.up": (n, e, d, 2 * f), "h.down": (n, e, f, d)}
        own: Any = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
        return Values(super().start.params | own, {}, self.specs)

    def block(self, x: jax.Array, p: Arrays) -> tuple[jax.Array, None]:
        """Each device has its experts' part of all tokens, which are summed."""
        x = attend(self, x, p)
        y = gather(rms_norm(x, p["ln2"]), "model", 1)
        out = self._experts(y.reshape(-1, y.shape[-1]), p)
        return x + scatter(out.reshape(y.shape), "model", 1), None

    def _experts(self, y_SD: jax.Array, p: Arrays) -> jax.Array:
        weights_S2, chosen_S2 = jax.lax.top_k(
            jax.nn.softmax((y_SD @ p["gate"].astype(y_SD.dtype)).astype(jnp.float32)), CHOSEN
        )
        weights_S2 = (weights_S2 / weights_S2.sum(-1, keepdims=True)).astype(y_SD.dtype)
        own = self.experts // jax.lax.axis_size("model")
        place_R = chosen_S2.reshape(-1) - jax.lax.axis_index("model") * own
        place_R = jnp.where((place_R >= 0) & (place_R < own), place_R, own)  # others' experts come last
        order_R = jnp.argsort(place_R)
        back_R = jnp.argsort(order_R)
        sizes = jnp.bincount(place_R, length=own + 1)[:own].astype(jnp.int32)
        used_R = jnp.arange(place_R.size) < sizes.sum()
        product = functools.partial(_product, sizes=sizes, interpret=self.interpret)
        gate, up = jnp.split(product(_to_rows(y_SD, order_R, back_R, used_R), self.whole(p["up"], 1)), 2, -1)
        out_RD = product(gated(gate, up), self.whole(p["down"], 1))
        return (_to_tokens(out_RD, order_R, back_R, used_R) * weights_S2[..., None]).sum(1)


def _product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    tiles = tuple(map(min, TILES, (rows.shape[0], *weights.shape[1:])))
    with jax.default_matmul_precision("default"):
        return gmm(rows, weights, sizes, rows.dtype, tiles, None, None, False, interpret)


def _sorted(y_SD: jax.Array, order_R: jax.Array) -> jax.Array:
    return y_SD[order_R // CHOSEN]


def _unsorted(x_RD: jax.Array, back_R: jax.Array, used_R: jax.Array) -> jax.Array:
    kept = jnp.where(used_R[:, None], x_RD, 0)  # the products leave other rows as they are
    return kept[back_R].reshape(-1, CHOSEN, x_RD.shape[-1])


@jax.custom_vjp
def _to_rows(y_SD: jax.Array, order_R: jax.Array, back_R: jax.Array, used_R: jax.Array) -> jax.Array:
    """Each token for each of its experts, these in order; backward nothing is scattered."""
    return _sorted(y_SD, order_R)


_to_rows.defvjp(
    lambda y, order, back, used: (_sorted(y, order), (back, used)),
    lambda saved, grad: (_unsorted(grad, *saved).sum(1), None, None, None),
)


@jax.custom_vjp
def _to_tokens(x_RD: jax.Array, order_R: jax.Array, back_R: jax.Array, used_R: jax.Array) -> jax.Array:
    """The way back: tokens by their experts, of which those of other devices give nothing."""
    return _unsorted(x_RD, back_R, used_R)


_to_tokens.defvjp(
    lambda x, order, back, used: (_unsorted(x, back, used), (order, used)),
    lambda saved, grad: (
        jnp.where(saved[1][:, None], grad.reshape(-1, grad.shape[-1])[saved[0]], 0),
        None,
        None,
        None,
    ),
)
