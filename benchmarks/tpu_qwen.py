"""A Qwen3-MoE for TPUs by hand: as the Mixtral, layer by layer, with many small experts and normed queries and keys.

Shapes: as in `tpu_mixtral`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Values
from benchmarks.tpu_layers import causal_attention, gated, gather, rms_norm, rotate, scatter
from benchmarks.tpu_llama import IN_OUT, OUT_IN
from benchmarks.tpu_mixtral import Mixtral, Rows, grouped

EXPERTS = P("model", "batch")
TILES = (128, 1024, 1024)
"""Of the grouped products: few rows, as an expert has few."""


@dataclasses.dataclass(frozen=True)
class Qwen(Mixtral):
    """Sizes, as in HF's config; `hidden` is that of an expert, `head` the width of a head."""

    layers: int = 3
    width: int = 2048
    hidden: int = 768
    heads: int = 32
    kv_heads: int = 4
    head: int = 128
    vocab: int = 151936
    base: float = 1e6
    experts: int = 64
    chosen: int = 8
    remat: bool = False

    @property
    def layer_entries(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Shape and spec of each parameter of a layer, weights (in, out)."""
        d, f, e, q, kv = self.width, self.hidden, self.experts, self.heads * self.head, self.kv_heads * self.head
        return {
            "q": ((d, q), IN_OUT),
            "k": ((d, kv), IN_OUT),
            "v": ((d, kv), IN_OUT),
            "o": ((q, d), OUT_IN),
            "q_norm": ((self.head,), P()),
            "k_norm": ((self.head,), P()),
            "ln1": ((d,), P()),
            "ln2": ((d,), P()),
            "gate": ((d, e), P()),
            "up": ((e, d, 2 * f), EXPERTS),
            "down": ((e, f, d), EXPERTS),
        }

    @property
    def _entries(self) -> dict[str, tuple[tuple[int, ...], P]]:
        d, v = self.width, self.vocab
        found: dict[str, tuple[tuple[int, ...], P]] = {
            "tok": ((v, d), OUT_IN),
            "head": ((d, v), IN_OUT),
            "ln": ((d,), P()),
        }
        layers = range(self.layers)
        return found | {f"h.{i}.{name}": entry for i in layers for name, entry in self.layer_entries.items()}

    @property
    def specs(self) -> dict[str, P]:
        """Of each parameter."""
        return {name: spec for name, (_, spec) in self._entries.items()}

    @property
    def start(self) -> Values:
        """Shapes of the parameters."""
        return Values.of_shapes({name: shape for name, (shape, _) in self._entries.items()}, self.specs)

    def run(self, x: jax.Array, params: Arrays) -> jax.Array:
        """All layers, one by one."""
        for layer in range(self.layers):
            prefix = f"h.{layer}."
            x = self.layer(layer, x, {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)})
        return x

    def layer(self, number: int, x: jax.Array, p: Arrays) -> jax.Array:
        """One of them; time is split over `model` between its halves, and in `x`."""
        x = x + self.attend(number, gather(rms_norm(x, p["ln1"]), "model", 1), p)
        y = gather(rms_norm(x, p["ln2"]), "model", 1)
        out = self.mix(y.reshape(-1, y.shape[-1]), p)
        return x + scatter(out.reshape(y.shape), "model", 1)

    def attend(self, number: int, y: jax.Array, p: Arrays) -> jax.Array:
        """Attention, scattered over time."""
        q, k, v = ((y @ self.whole(p[name], 0)).reshape(*y.shape[:2], -1, self.head) for name in "qkv")
        q, k = (rotate(rms_norm(x, p[name]), self.base) for x, name in ((q, "q_norm"), (k, "k_norm")))
        out = causal_attention(q, k, v, self.interpret)
        return scatter(out.reshape(*y.shape[:2], -1) @ self.whole(p["o"], 1), "model", 1)

    def mix(self, y_SD: jax.Array, p: Arrays) -> jax.Array:
        """What the experts of this device add to each token."""
        logits = (y_SD @ p["gate"].astype(y_SD.dtype)).astype(jnp.float32)
        weights_SC, chosen_SC = jax.lax.top_k(jax.nn.softmax(logits), self.chosen)
        rows = Rows.sort(chosen_SC, self.experts)
        product = functools.partial(grouped, rows=rows, tiles=TILES, interpret=self.interpret)
        gate, up = jnp.split(product(rows.take(y_SD), self.whole(p["up"], 1)), 2, -1)
        return rows.give(product(gated(gate, up), self.whole(p["down"], 1)), weights_SC.astype(y_SD.dtype))
