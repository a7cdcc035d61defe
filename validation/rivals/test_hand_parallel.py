"""The hand-parallel layers of the tutorials: torch's values and gradients, and no more communication than JAX's own."""

import ast
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.collectives import count_collectives

TUTORIALS = pathlib.Path(__file__).parents[2] / "tutorials"
SIZES = [(8, 1), (2, 4)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, sums in another order


def define(tutorial: str) -> dict[str, Any]:
    """What the imports and plain definitions of a tutorial define, without running the rest."""
    path = TUTORIALS / f"{tutorial}.py"
    tree = ast.parse(path.read_text())
    plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, plain) and not getattr(node, "decorator_list", ())]
    names: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), names)
    return names


BY_HAND, RING = define("shard_map_and_collectives"), define("ring_attention")


def mlp_in_jax(x: jax.Array, up: jax.Array, up_bias: jax.Array, down: jax.Array, bias: jax.Array) -> jax.Array:
    return lax.psum(jax.nn.gelu(x @ up.T + up_bias, approximate=False) @ down.T, "model") + bias


def cross_entropy_in_jax(x: jax.Array, head: jax.Array, target: jax.Array) -> jax.Array:
    logits = x @ head.T
    shifted = logits - lax.pmax(lax.stop_gradient(logits).max(1), "model")[:, None]
    index = target - lax.axis_index("model") * len(head)
    mine = (index >= 0) & (index < len(head))
    picked = jnp.take_along_axis(shifted, jnp.where(mine, index, 0)[:, None], 1)[:, 0]
    total, picked = lax.psum((jnp.exp(shifted).sum(1), jnp.where(mine, picked, 0)), "model")
    return lax.pmean((jnp.log(total) - picked).mean(), "batch")


def ring_in_jax(q: jax.Array, k: jax.Array, v: jax.Array, is_causal: bool) -> jax.Array:
    size, here, length = lax.axis_size("seq"), lax.axis_index("seq"), q.shape[2]
    best, total, out = jnp.full((*q.shape[:3], 1), -jnp.inf), 0, 0
    for hop in range(size):
        if hop:
            k, v = lax.ppermute((k, v), "seq", [(d, (d + 1) % size) for d in range(size)])
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if is_causal:
            keys = (here - hop) % size * length + jnp.arange(length)
            scores = jnp.where(keys > (here * length + jnp.arange(length))[:, None], -jnp.inf, scores)
        before, best = best, jnp.maximum(best, lax.stop_gradient(scores).max(-1, keepdims=True))
        weights = jnp.exp(scores - best)
        total = total * jnp.exp(before - best) + weights.sum(-1, keepdims=True)
        out = out * jnp.exp(before - best) + weights @ v
    return out / total


@dataclasses.dataclass
class Case:
    """One layer, thrice.

    It is differentiated by the first `num_weights` arguments, and `forward` says what it communicates where so many
    devices share it.
    """

    in_torch: Callable[..., torch.Tensor]
    in_jax: Callable[..., jax.Array]
    plain: Callable[..., torch.Tensor]
    args: tuple[torch.Tensor, ...]
    in_specs: tuple[P, ...]
    out_specs: P
    num_weights: int
    forward: Callable[[int], dict[str, int]]
    axis: str = "model"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))) / 2


MLP = (normal(16, 12), normal(24, 12), normal(24), normal(12, 24), normal(12))
TARGETS = torch.arange(16) * 7 % 32  # on every shard of the vocabulary, also where a row's largest logit is not
QKV = (normal(8, 2, 32, 4), normal(8, 2, 32, 4).flip(0), normal(8, 2, 32, 4).flip(2))
SPLIT = P("batch", None, "seq")
CASES = {
    "mlp": Case(
        BY_HAND["parallel_mlp"],
        mlp_in_jax,
        BY_HAND["plain_mlp"],
        MLP,
        (P("batch"), P("model"), P("model"), P(None, "model"), P()),
        P("batch"),
        5,
        lambda size: {"all-reduce": 1},
    ),
    "cross entropy": Case(
        BY_HAND["parallel_cross_entropy"],
        cross_entropy_in_jax,
        BY_HAND["plain_cross_entropy"],
        (normal(16, 12), normal(32, 12), TARGETS),
        (P("batch"), P("model"), P("batch")),
        P(),
        2,
        lambda size: {"all-reduce": 3},  # the largest; the sum and the picked logit, as one; the mean of the batch
    ),
} | {
    f"ring attention{', causal' * is_causal}": Case(
        functools.partial(RING["ring_attention"], is_causal=is_causal),
        functools.partial(ring_in_jax, is_causal=is_causal),
        functools.partial(F.scaled_dot_product_attention, is_causal=is_causal),
        QKV,
        (SPLIT,) * 3,
        SPLIT,
        3,
        lambda size: {"collective-permute": 2 * (size - 1)} if size > 1 else {},  # keys and values, at every hop
        "seq",
    )
    for is_causal in (False, True)
}
CASES |= {
    f"{name}, in a loop": dataclasses.replace(
        CASES[name], in_torch=lambda q, k, v, c=is_causal: RING["RingAttention"].apply(q, k, v, c)
    )
    for is_causal, name in enumerate(("ring attention", "ring attention, causal"))
}


def weights_of(out: torch.Tensor) -> torch.Tensor:
    """A loss that is a sum with these weights depends on each element in a way of its own."""
    return torch.linspace(1, 2, out.numel()).view(out.shape)


def plainly(case: Case) -> Any:
    """The result by eager torch, and the gradients of a weighted sum of it."""
    leaves = [arg.clone().requires_grad_() for arg in case.args[: case.num_weights]]
    out = case.plain(*leaves, *case.args[case.num_weights :])
    return out.detach(), torch.autograd.grad((out * weights_of(out)).sum(), leaves)


def on_mesh(name: str, sizes: tuple[int, int], *, in_jax: bool = False) -> tuple[Callable, Callable]:
    """The layer as a JAX function of its arguments, and its result and gradients as one of weights and arguments."""
    case = CASES[name]
    mesh = ts.make_mesh(**dict(zip(("batch", case.axis), sizes, strict=True)))
    where = {"mesh": mesh, "in_specs": case.in_specs, "out_specs": case.out_specs}
    fn = jax.shard_map(case.in_jax, **where) if in_jax else ts.jax_view(ts.jax_shard_map(case.in_torch, **where))

    def loss(weights: jax.Array, *args: jax.Array) -> Any:
        out = fn(*args)
        return (out * weights).sum(), out

    return fn, jax.grad(loss, tuple(range(1, case.num_weights + 1)), has_aux=True)


@pytest.mark.parametrize("sizes", [(2, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_plain_torch(name: str, sizes: tuple[int, int]) -> None:
    wanted, wanted_grads = plainly(CASES[name])
    grads, out = jax.jit(on_mesh(name, sizes)[1])(*ts.jax_view((weights_of(wanted), *CASES[name].args)))
    for found, torchs in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        np.testing.assert_allclose(found, torchs, **CLOSE)


def count(fn: Callable, *args: jax.Array) -> dict[str, int]:
    """How many collectives of each kind the compiled program has."""
    return count_collectives(jax.jit(fn).lower(*args).compile())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["mlp", "cross entropy", "ring attention"])
def test_no_more_communication_than_the_same_written_in_jax(name: str, sizes: tuple[int, int]) -> None:
    case = CASES[name]
    weights, *args = ts.jax_view((weights_of(case.plain(*case.args)), *case.args))
    (forward, both), (jax_forward, jax_both) = on_mesh(name, sizes), on_mesh(name, sizes, in_jax=True)
    found = count(forward, *args)
    assert found == case.forward(sizes[1])
    for mine, jaxs in [
        (found, count(jax_forward, *args)),
        (count(both, weights, *args), count(jax_both, weights, *args)),
    ]:
        assert all(n <= jaxs.get(kind, 0) for kind, n in mine.items()), (mine, jaxs)
