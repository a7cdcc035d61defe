"""A Llama for long rows by hand: the sequence and the parameters split over `context`, keys and values gathered.

The tokens are put into zig-zag order before the first layer, so that under the causal mask all devices compute as much:
of 2n chunks device i of n has i and 2n - 1 - i. Positions and targets are put into that order with them; keys and
values are put back into theirs where they are gathered.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays, Rival
from benchmarks.tpu_layers import BLOCK, gated, gather, rms_norm, rotate, token_losses
from benchmarks.tpu_llama import Llama

ALL = ("batch", "context")


@dataclasses.dataclass(frozen=True)
class LongLlama(Llama):
    """Sizes, and how long a row is."""

    length: int = 131072

    @property
    def specs(self) -> dict[str, P]:
        """Of each parameter: the first dim of weights, that of words the second."""
        layers = {f"h.{name}": P(None, ALL) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        return layers | dict.fromkeys(("h.ln1", "h.ln2", "ln"), P()) | {"tok": P(None, ALL), "head": P(ALL)}

    def rival(self, mesh: Mesh) -> Rival:
        """Float32 parameters, narrow arithmetic."""
        num = mesh.shape["context"]
        chunks = np.arange(self.length, dtype=np.int32).reshape(2 * num, -1)
        order = np.concatenate([chunks[at] for i in range(num) for at in (i, 2 * num - 1 - i)])
        kernel = _kernel(self, order, num)
        of_rows = P("batch", "context")
        of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, "context")))
        sharded = jax.shard_map(
            functools.partial(_loss, self),
            mesh=mesh,
            in_specs=(self.specs, of_rows, of_rows, P("context"), of_kernel),
            out_specs=P(),
            check_vma=False,
        )

        def loss(params: Arrays, buffers: Arrays, batch: Any) -> Any:
            (tokens,) = batch
            targets = jnp.roll(tokens, -1, axis=1)
            total = sharded(params, tokens[:, order], targets[:, order], jnp.asarray(order), kernel)
            return total / (tokens.shape[0] * (self.length - 1)), buffers

        return Rival(loss)

    def whole(self, weight: jax.Array, dim: int) -> jax.Array:
        """What FSDP has split, gathered narrow."""
        return jax.lax.all_gather(weight.astype(self.dtype), ALL, axis=dim, tiled=True)


def _kernel(sizes: LongLlama, order: np.ndarray, num: int) -> Any:
    mask = splash.CausalMask((sizes.length, sizes.length))
    mask.q_sequence = order
    block = min(BLOCK, sizes.length // (2 * num))
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return splash.make_splash_mha(
        mask=splash.MultiHeadMask([mask] * sizes.heads),
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        head_shards=1,
        q_seq_shards=num,
        interpret=sizes.interpret,
    )


def _loss(
    sizes: LongLlama, params: Arrays, tokens: jax.Array, targets: jax.Array, places: jax.Array, kernel: Any
) -> jax.Array:
    ids = jax.lax.all_gather(tokens.reshape(-1), ALL, tiled=True)
    rows = params["tok"].astype(sizes.dtype)[ids]
    x = jax.lax.all_to_all(rows, ALL, 0, 1, tiled=True).reshape(*tokens.shape, -1)
    layers = {name.removeprefix("h."): value for name, value in params.items() if name.startswith("h.")}
    block = jax.checkpoint(lambda x, p: (_block(sizes, x, p, places, kernel), None), prevent_cse=False)
    x, _ = jax.lax.scan(block, x, layers)
    losses = token_losses(rms_norm(x, params["ln"]) @ sizes.whole(params["head"], 0), targets, None)
    return jax.lax.psum(jnp.where(places < sizes.length - 1, losses, 0).sum(), ALL)


def _in_order(x_BKSH: jax.Array) -> jax.Array:
    """Keys or values of all devices, as the rows have them."""
    num = jax.lax.axis_size("context")
    chunks = jnp.split(x_BKSH, 2 * num, 2)
    return jnp.concatenate(chunks[::2] + chunks[::-2], 2)


def _block(sizes: LongLlama, x: jax.Array, p: Arrays, places: jax.Array, kernel: Any) -> jax.Array:
    y = rms_norm(x, p["ln1"])
    width = sizes.width // sizes.heads
    q, k, v = ((y @ sizes.whole(p[name], 0)).reshape(*y.shape[:2], -1, width) for name in "qkv")
    q, k = (rotate(x, sizes.base, places) for x in (q, k))
    k, v = (_in_order(gather(x.swapaxes(1, 2), "context", 2)) for x in (k, v))
    with jax.default_matmul_precision("default"):  # Mosaic knows no other
        out = jax.vmap(kernel)(q.swapaxes(1, 2) * width**-0.5, k, v).swapaxes(1, 2)
    x = x + out.reshape(*y.shape[:2], -1) @ sizes.whole(p["o"], 0)
    y = rms_norm(x, p["ln2"])
    inner = gated(y @ sizes.whole(p["gate"], 0), y @ sizes.whole(p["up"], 0))
    return x + inner @ sizes.whole(p["down"], 0)
