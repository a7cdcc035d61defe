"""A Mixtral for TPUs by hand: as the Llama, with experts over `model` and JAX's grouped products on each device.

Shapes: S tokens of all devices of `model`, C experts of each, R rows: of each token one for each of these; F hidden.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Values
from benchmarks.tpu_layers import gated, gather, rms_norm, scatter
from benchmarks.tpu_llama import Llama, attend

EXPERTS = P(None, "model", "batch")
TILES = (512, 1024, 1024)
"""Of the grouped products: rows, inputs, outputs."""


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
    chosen: int = 2

    @property
    def specs(self) -> dict[str, P]:
        """The experts' first dim is over `model`, which need not split anything within."""
        return super().specs | {"h.gate": P(), "h.up": EXPERTS, "h.down": EXPERTS}

    @property
    def start(self) -> Values:
        """`up` holds the gate, too; `gate` is the router."""
        n, d, f, e = self.layers, self.width, self.hidden, self.experts
        shapes = {"h.gate": (n, d, e), "h.up": (n, e, d, 2 * f), "h.down": (n, e, f, d)}
        own = Values.of_shapes(shapes, self.specs)
        return Values(super().start.params | own.params, {}, self.specs)

    def block(self, x: jax.Array, p: Arrays) -> tuple[jax.Array, None]:
        """Each device has its experts' part of all tokens, which are summed."""
        x = attend(self, x, p)
        y = gather(rms_norm(x, p["ln2"]), "model", 1)
        out = self._experts(y.reshape(-1, y.shape[-1]), p)
        return x + scatter(out.reshape(y.shape), "model", 1), None

    def _experts(self, y_SD: jax.Array, p: Arrays) -> jax.Array:
        logits = (y_SD @ p["gate"].astype(y_SD.dtype)).astype(jnp.float32)
        weights_SC, chosen_SC = jax.lax.top_k(jax.nn.softmax(logits), self.chosen)
        weights_SC = (weights_SC / weights_SC.sum(-1, keepdims=True)).astype(y_SD.dtype)
        rows = Rows.sort(chosen_SC, self.experts)
        product = functools.partial(grouped, rows=rows, tiles=TILES, interpret=self.interpret)
        gate, up = jnp.split(product(rows.take(y_SD), self.whole(p["up"], 1)), 2, -1)
        return rows.give(product(gated(gate, up), self.whole(p["down"], 1)), weights_SC)


def share_of_rows(chosen: int, num_tokens: int, experts: tuple[int, int], tile: int) -> float:
    """Rows in the tiles that grouped products work on, over those they are given: where each expert has as many.

    Args:
        chosen: Experts of a token.
        num_tokens: On a device.
        experts: In all, and on a device.
        tile: Rows of a tile; one in which experts meet is worked on once for each of them.
    """
    num_rows, (num_all, num_here) = chosen * num_tokens, experts
    return min((num_rows * num_here / num_all + (num_here - 1) * tile) / num_rows, 1.0)


def grouped(
    x_RI: jax.Array, weights_EIO: jax.Array, *, rows: "Rows", tiles: tuple[int, int, int], interpret: bool
) -> jax.Array:
    """JAX's grouped product of rows, each with its expert's matrix."""
    tiles = (min(tiles[0], x_RI.shape[0]), min(tiles[1], weights_EIO.shape[1]), min(tiles[2], weights_EIO.shape[2]))
    with jax.default_matmul_precision("default"):
        return gmm(x_RI, weights_EIO, rows.sizes, x_RI.dtype, tiles, None, None, False, interpret)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Each token for each of its experts, in the order of the experts that are here; those of others come last.

    Attributes:
        order: Of these, which pair of token and choice it is.
        back: Where each pair is.
        used: Whether its expert is here, in order.
        expert: Its number here, in order.
        sizes: Rows of each expert here.
        chosen: Experts of a token.
    """

    order: jax.Array
    back: jax.Array
    used: jax.Array
    expert: jax.Array
    sizes: jax.Array
    chosen: int

    @classmethod
    def sort(cls, chosen_SC: jax.Array, experts: int) -> "Rows":
        """Of all pairs those whose expert this device of `model` has."""
        own = experts // jax.lax.axis_size("model")
        place_R = chosen_SC.reshape(-1) - jax.lax.axis_index("model") * own
        place_R = jnp.where((place_R >= 0) & (place_R < own), place_R, own)
        order_R = jnp.argsort(place_R)
        sizes = (place_R[:, None] == jnp.arange(own)).sum(0, dtype=jnp.int32)  # bincount would be a loop of searches
        used_R = jnp.arange(place_R.size) < sizes.sum()
        return cls(order_R, jnp.argsort(order_R), used_R, place_R[order_R], sizes, chosen_SC.shape[1])

    def take(self, y_SD: jax.Array) -> jax.Array:
        """`y_RD`."""
        return _to_rows(self.chosen, y_SD, self.order, self.back, self.used)

    def give(self, out_RD: jax.Array, weights_SC: jax.Array) -> jax.Array:
        """Each token's sum, `out_SD`."""
        return (_to_tokens(self.chosen, out_RD, self.order, self.back, self.used) * weights_SC[..., None]).sum(1)


def _sorted(chosen: int, y_SD: jax.Array, order_R: jax.Array) -> jax.Array:
    return y_SD[order_R // chosen]


def _unsorted(chosen: int, x_RD: jax.Array, back_R: jax.Array, used_R: jax.Array) -> jax.Array:
    kept = jnp.where(used_R[:, None], x_RD, 0)  # the products leave other rows as they are
    return kept[back_R].reshape(-1, chosen, x_RD.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_rows(chosen: int, y_SD: jax.Array, order_R: jax.Array, back_R: jax.Array, used_R: jax.Array) -> jax.Array:
    """Each token for each of its experts, these in order; backward nothing is scattered."""
    return _sorted(chosen, y_SD, order_R)


_to_rows.defvjp(
    lambda chosen, y, order, back, used: (_sorted(chosen, y, order), (back, used)),
    lambda chosen, saved, grad: (_unsorted(chosen, grad, *saved).sum(1), None, None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_tokens(chosen: int, x_RD: jax.Array, order_R: jax.Array, back_R: jax.Array, used_R: jax.Array) -> jax.Array:
    """The way back: tokens by their experts, of which those of other devices give nothing."""
    return _unsorted(chosen, x_RD, back_R, used_R)


_to_tokens.defvjp(
    lambda chosen, x, order, back, used: (_unsorted(chosen, x, back, used), (order, used)),
    lambda chosen, saved, grad: (
        jnp.where(saved[1][:, None], grad.reshape(-1, grad.shape[-1])[saved[0]], 0),
        None,
        None,
        None,
    ),
)
