"""The rivals: the same models and optimisers written by hand in plain JAX, jitted, sharded and donated alike."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.pieces import ATTENTION, EMBED, GELU, LOSS, NORM

Params = dict[str, jax.Array]
LossFn = Callable[[Params, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How to write the GPT: which variant of each piece (see `benchmarks.pieces`), and how the layers are held.

    Attributes:
        attention: Key of `ATTENTION`.
        loss: Key of `LOSS`.
        gelu: Key of `GELU`.
        norm: Key of `NORM`.
        embed: Key of `EMBED`.
        weights: `in_out`, as JAX people store them, or `out_in`, as torch does.
        scan: `jax.lax.scan` over stacked blocks instead of a Python loop.
        flat: Linear layers work on `(B * T, D)`.
    """

    attention: str = "dpa"
    loss: str = "optax"
    gelu: str = "nn"
    norm: str = "plain"
    embed: str = "gather"
    weights: str = "in_out"
    scan: bool = False
    flat: bool = False


def _is_transposed(name: str, variant: Variant) -> bool:
    """Whether the rival holds this entry of the state_dict transposed: the weight of a linear layer."""
    kind = name.split(".")[-2]
    return variant.weights == "in_out" and name.endswith(".weight") and kind not in ("tok", "pos", "ln", "ln1", "ln2")


def convert(values: dict[str, np.ndarray], variant: Variant) -> dict[str, np.ndarray]:
    """A torch state_dict as the rival's parameters."""
    values = {n: np.ascontiguousarray(v.T) if _is_transposed(n, variant) else v for n, v in values.items()}
    if not variant.scan:
        return values
    inner = {n.split(".", 2)[2] for n in values if n.startswith("h.")}
    depth = 1 + max(int(n.split(".")[1]) for n in values if n.startswith("h."))
    stacked = {f"h.{n}": np.stack([values[f"h.{i}.{n}"] for i in range(depth)]) for n in inner}
    return {n: v for n, v in values.items() if not n.startswith("h.")} | stacked


def convert_specs(specs: dict[str, P], values: dict[str, np.ndarray], variant: Variant) -> dict[str, P]:
    """Specs of torch's names as specs of the rival's parameters."""
    turned = {
        n: P(*reversed((*s, *(None,) * (values[n].ndim - len(s))))) if _is_transposed(n, variant) else s
        for n, s in specs.items()
    }
    if not variant.scan:
        return turned
    return {
        (f"h.{n.split('.', 2)[2]}" if n.startswith("h.") else n): (P(None, *s) if n.startswith("h.") else s)
        for n, s in turned.items()
    }


def gpt_loss(variant: Variant, heads: int) -> LossFn:
    """`loss(params, (tokens, targets))` of the GPT."""
    attend, cross_entropy = ATTENTION[variant.attention], LOSS[variant.loss]
    gelu, norm, embed = GELU[variant.gelu], NORM[variant.norm], EMBED[variant.embed]

    def linear(p: Params, name: str, x: jax.Array) -> jax.Array:
        weight = p[f"{name}.weight"]
        rows = x.reshape(-1, x.shape[-1]) if variant.flat else x
        out = rows @ (weight if variant.weights == "in_out" else weight.T) + p[f"{name}.bias"]
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def block(x: jax.Array, p: Params) -> jax.Array:
        y = norm(x, p["ln1.weight"], p["ln1.bias"])
        q, k, v = (linear(p, n, y).reshape(*y.shape[:2], heads, -1) for n in "qkv")
        x = x + linear(p, "o", attend(q, k, v).reshape(y.shape))
        y = norm(x, p["ln2.weight"], p["ln2.bias"])
        return x + linear(p, "down", gelu(linear(p, "up", y)))

    def loss(params: Params, batch: Any) -> jax.Array:
        tokens, targets = batch
        x = embed(params["tok.weight"], tokens) + params["pos.weight"][: tokens.shape[1]]
        if variant.scan:
            stacked = {n[2:]: v for n, v in params.items() if n.startswith("h.")}
            x = jax.lax.scan(lambda x, p: (block(x, p), None), x, stacked)[0]
        else:
            depth = sum(n.startswith("h.") and n.endswith(".q.weight") for n in params)
            for i in range(depth):
                prefix = f"h.{i}."
                x = block(x, {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)})
        x = norm(x, params["ln.weight"], params["ln.bias"])
        return cross_entropy(x @ params["tok.weight"].T, targets)

    return loss


def mlp_loss(loss: str = "optax", weights: str = "in_out") -> LossFn:
    """`loss(params, (x, classes))` of the MLP, whose linear layers are numbered as in `nn.Sequential`."""

    def value(params: Params, batch: Any) -> jax.Array:
        x, classes = batch
        numbers = sorted({int(n.split(".")[0]) for n in params})
        for number in numbers:
            weight = params[f"{number}.weight"]
            x = x @ (weight if weights == "in_out" else weight.T) + params[f"{number}.bias"]
            x = jax.nn.relu(x) if number != numbers[-1] else x
        return LOSS[loss](x, classes)

    return value


class HandwrittenStep:
    """A train step as a careful JAX user writes it: one jit, pinned shardings, donated state, loss and grad norm."""

    def __init__(
        self,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        values: dict[str, np.ndarray],
        specs: dict[str, P],
    ) -> None:
        shardings = {n: NamedSharding(mesh, specs[n]) for n in values}
        replicated, self.rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
        params = {n: jax.device_put(v, shardings[n]) for n, v in values.items()}
        opt_shardings = optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, params),
            shardings,
            transform_non_params=lambda _: replicated,
        )
        opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
        self.state = (params, opt_state)

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
            return (optax.apply_updates(params, updates), opt_state), metrics

        state_shardings = (shardings, opt_shardings)
        self.jitted = jax.jit(
            step,
            in_shardings=(state_shardings, self.rows),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
        )

    def put(self, batch: Any) -> Any:
        """A batch of CPU tensors on the mesh."""
        arrays = [t.numpy().astype(np.int32) if not t.is_floating_point() else t.numpy() for t in batch]
        return jax.device_put(tuple(arrays), self.rows)

    def __call__(self, batch: Any) -> dict[str, jax.Array]:
        """Train by one step and wait for it."""
        self.state, metrics = self.jitted(self.state, self.put(batch))
        return jax.block_until_ready((self.state, metrics))[1]


def gpt_step(
    variant: Variant,
    heads: int,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    values: dict[str, np.ndarray],
    specs: dict[str, P],
) -> HandwrittenStep:
    """The GPT's rival, from torch's values and specs by torch's names."""
    mine, my_specs = convert(values, variant), convert_specs(specs, values, variant)
    return HandwrittenStep(gpt_loss(variant, heads), optimizer, mesh, mine, my_specs)
