"""GPT-2 for TPUs by hand: data parallel, bfloat16 arithmetic, splash attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Rival, Values
from benchmarks.tpu_layers import heads_first_attention, layer_norm, next_token_loss


@dataclasses.dataclass(frozen=True)
class Gpt:
    """Sizes, as in HF's config, and how it is trained."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    length: int = 1024
    unroll: bool = True
    interpret: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def start(self) -> Values:
        """Shapes of the parameters, weights (in, out); those of the layers are stacked."""
        n, d = self.layers, self.width
        shapes = {"tok": (self.vocab, d), "pos": (self.length, d), "ln": (d,), "ln.bias": (d,)}
        shapes |= {f"h.{ln}{part}": (n, d) for ln in ("ln1", "ln2") for part in ("", ".bias")}
        for name, (ins, outs) in {"qkv": (d, 3 * d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}.items():
            shapes |= {f"h.{name}": (n, ins, outs), f"h.{name}.bias": (n, outs)}
        return Values.of_shapes(shapes, dict.fromkeys(shapes, P()))

    def rival(self, mesh: Mesh) -> Rival:
        """Each device with its own rows; gradients are summed narrow, as they come out of the products."""
        sharded = jax.shard_map(
            functools.partial(_loss, self), mesh=mesh, in_specs=(P(), P("batch")), out_specs=P(), check_vma=False
        )

        def loss(params: Arrays, buffers: Arrays, batch: Any) -> Any:
            narrow = {name: p if "ln" in name else p.astype(self.dtype) for name, p in params.items()}
            return sharded(narrow, *batch), buffers

        return Rival(loss)


def _loss(sizes: Gpt, params: Arrays, tokens: jax.Array) -> jax.Array:
    layers = {name.removeprefix("h."): value for name, value in params.items() if name.startswith("h.")}
    x = params["tok"][tokens] + params["pos"][: tokens.shape[1]]
    block = functools.partial(_block, sizes)
    x, _ = jax.lax.scan(block, x, layers, unroll=sizes.layers if sizes.unroll else 1)
    logits = layer_norm(x, params["ln"], params["ln.bias"]) @ params["tok"].T
    count = tokens.shape[0] * jax.lax.axis_size("batch") * (tokens.shape[1] - 1)
    return jax.lax.psum(next_token_loss(logits, tokens, None), "batch") / count


def _block(sizes: Gpt, x: jax.Array, p: Arrays) -> tuple[jax.Array, None]:
    y = layer_norm(x, p["ln1"], p["ln1.bias"])
    weight, bias = (p[n].reshape(*p[n].shape[:-1], 3, sizes.heads, -1) for n in ("qkv", "qkv.bias"))
    q, k, v = (jnp.einsum("btd,dnh->bnth", y, weight[:, i]) + bias[i, :, None] for i in range(3))
    out = heads_first_attention(q, k, v, sizes.interpret)
    x = x + jnp.einsum("bnth,nhd->btd", out, p["o"].reshape(sizes.heads, -1, sizes.width)) + p["o.bias"]
    y = layer_norm(x, p["ln2"], p["ln2.bias"])
    return x + _gelu(y @ p["up"] + p["up.bias"]) @ p["down"] + p["down.bias"], None


_gelu = jax.checkpoint(jax.nn.gelu)
