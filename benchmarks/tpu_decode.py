"""The loop over new tokens of a Llama by hand, for TPUs: tensor parallel, keys and values of each device's heads.

Shapes: B rows, D model, N heads, K heads of keys, G heads of queries for each of them, L slots, H of one head, V words.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import Arrays
from benchmarks.tpu_layers import gated, rms_norm
from benchmarks.tpu_llama import Llama

SPECS = {
    **{name: P(None, "model") for name in ("q", "k", "v", "gate", "up", "head")},
    **{name: P("model") for name in ("o", "down", "tok")},
    **{name: P() for name in ("ln", "ln1", "ln2")},
}
CACHE = P(None, "model")


@dataclasses.dataclass(frozen=True)
class DecodeByHand:
    """Greedy tokens after a prompt.

    Attributes:
        sizes: Of the model; weights are bfloat16, (in, out).
        rows: B.
        slots: L.
        num_new: Number of tokens.
    """

    sizes: Llama
    rows: int
    slots: int
    num_new: int

    def shapes(self) -> Arrays:
        """Of the weights, by name; those of layers by number and name."""
        s, width = self.sizes, self.sizes.width // self.sizes.heads
        layer = {
            "q": (s.width, s.width),
            "k": (s.width, s.kv_heads * width),
            "v": (s.width, s.kv_heads * width),
            "o": (s.width, s.width),
            "gate": (s.width, s.hidden),
            "up": (s.width, s.hidden),
            "down": (s.hidden, s.width),
            "ln1": (s.width,),
            "ln2": (s.width,),
        }
        layers = {f"{i}.{name}": shape for i in range(s.layers) for name, shape in layer.items()}
        return layers | {"tok": (s.vocab, s.width), "head": (s.width, s.vocab), "ln": (s.width,)}

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The loop, for shapes alone."""
        width = self.sizes.width // self.sizes.heads
        specs = {name: SPECS[name.rpartition(".")[2]] for name in self.shapes()}
        cache = (self.rows, self.sizes.kv_heads, self.slots, width)
        given = (specs, P(), P(), P(), [CACHE] * self.sizes.layers, [CACHE] * self.sizes.layers)
        types = (
            {name: (shape, jnp.bfloat16) for name, shape in self.shapes().items()},
            ((self.rows,), jnp.int32),
            ((self.rows, self.slots), jnp.int32),
            ((), jnp.int32),
            [(cache, jnp.bfloat16)] * self.sizes.layers,
            [(cache, jnp.bfloat16)] * self.sizes.layers,
        )
        structs = jax.tree.map(
            lambda spec, of: jax.ShapeDtypeStruct(*of, sharding=NamedSharding(mesh, spec)),
            given,
            types,
            is_leaf=lambda x: isinstance(x, P),
        )
        run = jax.shard_map(self.run, mesh=mesh, in_specs=given, out_specs=P(), check_vma=False)
        return jax.jit(run).lower(*structs)

    def run(
        self, params: Arrays, first: jax.Array, mask: jax.Array, filled: jax.Array, keys: Any, values: Any
    ) -> jax.Array:
        """Tokens (B, number of new ones)."""
        tokens = jnp.zeros((self.rows, self.num_new), jnp.int32).at[:, 0].set(first)

        def step(carry: Any) -> Any:
            number, token, tokens, cache = carry
            token, cache = self.token(params, token, mask, filled + number - 1, cache)
            return number + 1, token, jax.lax.dynamic_update_slice(tokens, token[:, None], (0, number)), cache

        start = (jnp.ones((), jnp.int32), first, tokens, list(zip(keys, values, strict=True)))
        return jax.lax.while_loop(lambda carry: carry[0] < self.num_new, step, start)[2]

    def token(
        self, params: Arrays, token: jax.Array, mask: jax.Array, at: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """The next token, and the cache with this one."""
        positions = jnp.where(jnp.arange(self.slots) < at, mask, 0).sum(-1)
        sees = (mask == 1) & (jnp.arange(self.slots) <= at)
        x, updated = embed(params["tok"], token), []
        for number, held in enumerate(cache):
            p = {name.partition(".")[2]: w for name, w in params.items() if name.startswith(f"{number}.")}
            y, held = self.attend(rms_norm(x, p["ln1"]), p, positions, sees, at, held)
            x = x + jax.lax.psum(y, "model")
            y = rms_norm(x, p["ln2"])
            x = x + jax.lax.psum(gated(y @ p["gate"], y @ p["up"]) @ p["down"], "model")
            updated.append(held)
        return largest(rms_norm(x, params["ln"]) @ params["head"]), updated

    def attend(
        self, x_BD: jax.Array, p: Arrays, positions: jax.Array, sees_BL: jax.Array, at: jax.Array, held: Any
    ) -> tuple[jax.Array, Any]:
        """The output of this device's heads, and their keys and values with the new ones."""
        width = self.sizes.width // self.sizes.heads
        q, k, v = ((x_BD @ p[name]).reshape(self.rows, -1, width) for name in "qkv")
        q, k = (rotated(x, positions, self.sizes.base) for x in (q, k))
        keys, values = (
            jax.lax.dynamic_update_slice(old, new[:, :, None], (0, 0, at, 0))
            for old, new in zip(held, (k, v), strict=True)
        )
        q_BKGH = (q * width**-0.5).reshape(self.rows, keys.shape[1], -1, width)
        scores = jnp.einsum("bkgh,bklh->bkgl", q_BKGH, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(sees_BL[:, None, None], scores, -jnp.inf), axis=-1).astype(keys.dtype)
        return jnp.einsum("bkgl,bklh->bkgh", weights, values).reshape(self.rows, -1) @ p["o"], (keys, values)


def embed(table_VD: jax.Array, token_B: jax.Array) -> jax.Array:
    """Rows of a table whose words are split."""
    places = token_B - jax.lax.axis_index("model") * table_VD.shape[0]
    own = (places >= 0) & (places < table_VD.shape[0])
    return jax.lax.psum(jnp.where(own[:, None], table_VD[jnp.where(own, places, 0)], 0), "model")


def rotated(x_BNH: jax.Array, positions_B: jax.Array, base: float) -> jax.Array:
    """Rotary positions, halves as in HF's models."""
    half = x_BNH.shape[-1] // 2
    angles = positions_B[:, None, None] * base ** (-jnp.arange(half) / half)
    cos, sin = (f(angles).astype(x_BNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BNH, 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def largest(logits_BV: jax.Array) -> jax.Array:
    """The most probable of the words, which are split."""
    wide = logits_BV.astype(jnp.float32)
    best = jax.lax.all_gather(wide.max(-1), "model")
    word = jax.lax.all_gather(wide.argmax(-1) + jax.lax.axis_index("model") * logits_BV.shape[1], "model")
    return jnp.take_along_axis(word, best.argmax(0)[None], 0)[0].astype(jnp.int32)
