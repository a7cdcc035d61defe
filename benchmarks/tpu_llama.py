"""A Llama for TPUs by hand: FSDP and tensor parallel, the residual stream split over time, splash attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Rival, Values
from benchmarks.tpu_layers import causal_attention, embed, gated, gather, next_token_loss, rms_norm, rotate, scatter

IN_OUT, OUT_IN = P("batch", "model"), P("model", "batch")
"""Of weights (in, out), by the one of their dims that tensor parallelism splits."""


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes, as in HF's config, and how it is trained."""

    layers: int = 4
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    base: float = 500000.0
    remat: bool = True
    unroll: bool = False
    interpret: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def specs(self) -> dict[str, P]:
        """Of each parameter; those of the layers are stacked."""
        columns = dict.fromkeys(("h.q", "h.k", "h.v", "h.gate", "h.up"), P(None, *IN_OUT))
        norms = dict.fromkeys(("h.ln1", "h.ln2", "ln"), P())
        return columns | dict.fromkeys(("h.o", "h.down"), P(None, *OUT_IN)) | norms | {"tok": OUT_IN, "head": IN_OUT}

    @property
    def start(self) -> Values:
        """Shapes of the parameters, weights (in, out)."""
        d, f, v, kv = self.width, self.hidden, self.vocab, self.width // self.heads * self.kv_heads
        layer = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
        shapes = {f"h.{name}": (self.layers, *shape) for name, shape in layer.items()}
        shapes |= {"h.ln1": (self.layers, d), "h.ln2": (self.layers, d), "ln": (d,), "tok": (v, d), "head": (d, v)}
        return Values.of_shapes(shapes, self.specs)

    def rival(self, mesh: Mesh) -> Rival:
        """Float32 parameters, narrow arithmetic."""
        sharded = jax.shard_map(
            functools.partial(_loss, self), mesh=mesh, in_specs=(self.specs, P("batch")), out_specs=P(), check_vma=False
        )
        return Rival(lambda params, buffers, batch: (sharded(params, *batch), buffers))

    def whole(self, weight: jax.Array, dim: int) -> jax.Array:
        """What FSDP has split, gathered narrow."""
        return gather(weight.astype(self.dtype), "batch", dim)

    def run(self, x: jax.Array, params: Arrays) -> jax.Array:
        """All layers."""
        layers = {name.removeprefix("h."): value for name, value in params.items() if name.startswith("h.")}
        body = jax.checkpoint(self.block, prevent_cse=False) if self.remat else self.block
        return jax.lax.scan(body, x, layers, unroll=self.layers if self.unroll else 1)[0]

    def block(self, x: jax.Array, p: Arrays) -> tuple[jax.Array, None]:
        """One layer; time is split over `model` between its halves, and in `x`."""
        x = attend(self, x, p)
        y = gather(rms_norm(x, p["ln2"]), "model", 1)
        inner = gated(y @ self.whole(p["gate"], 0), y @ self.whole(p["up"], 0))
        return x + scatter(inner @ self.whole(p["down"], 1), "model", 1), None


def _loss(sizes: Llama, params: Arrays, tokens: jax.Array) -> jax.Array:
    x = sizes.run(embed(sizes.whole(params["tok"], 1), tokens, "model"), params)
    logits = gather(rms_norm(x, params["ln"]), "model", 1) @ sizes.whole(params["head"], 0)
    count = tokens.shape[0] * jax.lax.axis_size("batch") * (tokens.shape[1] - 1)
    return jax.lax.psum(next_token_loss(logits, tokens, "model"), "batch") / count


def attend(sizes: Llama, x: jax.Array, p: Arrays) -> jax.Array:
    """The first half of a layer, with the residual stream."""
    y = gather(rms_norm(x, p["ln1"]), "model", 1)
    width = sizes.width // sizes.heads
    q, k, v = ((y @ sizes.whole(p[name], 0)).reshape(*y.shape[:2], -1, width) for name in "qkv")
    out = causal_attention(rotate(q, sizes.base), rotate(k, sizes.base), v, sizes.interpret)
    return x + scatter(out.reshape(*y.shape[:2], -1) @ sizes.whole(p["o"], 1), "model", 1)
