"""A gpt-oss for TPUs by hand: as the Qwen, with biases, sinks, windows in every other layer, and the clamped gate.

Shapes: as in `tpu_mixtral`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays
from benchmarks.tpu_layers import causal_attention, rotate, scatter
from benchmarks.tpu_mixtral import Rows, grouped
from benchmarks.tpu_qwen import TILES, Qwen

ALPHA, LIMIT = 1.702, 7.0


@dataclasses.dataclass(frozen=True)
class GptOss(Qwen):
    """Sizes, as in HF's config. Gate and up are the halves of `up`; every other layer, the first too, has a window."""

    width: int = 2880
    hidden: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head: int = 64
    vocab: int = 201088
    base: float = 150000.0
    experts: int = 16
    chosen: int = 4
    window: int = 128

    @property
    def layer_entries(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Shape and spec of each parameter of a layer, weights (in, out)."""
        found = {name: entry for name, entry in super().layer_entries.items() if not name.endswith("_norm")}
        split, whole = P("model"), P()
        specs = {"q": split, "k": split, "v": split, "o": whole, "gate": whole, "up": split, "down": split}
        for name, spec in specs.items():
            shape = found[name][0]
            found[f"{name}.bias"] = ((*shape[:-2], shape[-1]), spec)
        return found | {"sinks": ((self.heads,), split)}

    def attend(self, number: int, y: jax.Array, p: Arrays) -> jax.Array:
        """Attention, scattered over time."""
        q, k, v = (y @ self.whole(p[n], 0) + p[f"{n}.bias"].astype(y.dtype) for n in "qkv")
        q, k, v = (x.reshape(*y.shape[:2], -1, self.head) for x in (q, k, v))
        window = None if number % 2 else self.window
        q, k = (rotate(x, self.base) for x in (q, k))
        out = causal_attention(q, k, v, self.interpret, window=window, sinks_N=p["sinks"])
        out = scatter(out.reshape(*y.shape[:2], -1) @ self.whole(p["o"], 1), "model", 1)
        return out + p["o.bias"].astype(y.dtype)

    def mix(self, y_SD: jax.Array, p: Arrays) -> jax.Array:
        """What the experts of this device add to each token."""
        logits = y_SD @ p["gate"].astype(y_SD.dtype) + p["gate.bias"].astype(y_SD.dtype)
        values_SC, chosen_SC = jax.lax.top_k(logits, self.chosen)
        weights_SC = jax.nn.softmax(values_SC.astype(jnp.float32)).astype(y_SD.dtype)
        rows = Rows.sort(chosen_SC, self.experts)
        product = functools.partial(grouped, rows=rows, tiles=TILES, interpret=self.interpret)
        is_own_RE = jax.nn.one_hot(rows.expert, len(p["up.bias"]), dtype=y_SD.dtype)
        bias_up, bias_down = (is_own_RE @ p[f"{name}.bias"].astype(y_SD.dtype) for name in ("up", "down"))
        used_R1 = rows.used[:, None]  # the products leave other rows as they are, and the biases would sum these
        pre = jnp.where(used_R1, product(rows.take(y_SD), self.whole(p["up"], 1)) + bias_up, 0)
        out = product(_clamped(*jnp.split(pre, 2, -1)), self.whole(p["down"], 1))
        return rows.give(jnp.where(used_R1, out + bias_down, 0), weights_SC)


@jax.checkpoint
def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The inner part of an expert."""
    wide, up = (x.astype(jnp.float32) for x in (gate, up))
    wide, up = jnp.minimum(wide, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return ((up + 1) * wide * jax.nn.sigmoid(ALPHA * wide)).astype(gate.dtype)
