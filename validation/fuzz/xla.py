"""XLA's partitioner alone, in plain JAX: drawn layouts of products and convolutions, at once and as steps lay out."""

import random
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from torch_shard._common.specs import axes_of
from torch_shard._sharding import Layout, Stacks, constrain_stacks
from validation.fuzz.specs import all_specs

AXES = ("extra", "batch", "model")
EXACT = 1e-9  # of the largest entry, in float64
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def sweep(num: int) -> Iterator[tuple[str, str]]:
    """Draw layouts of two weights, and judge what XLA makes of the loss and of their gradients.

    Args:
        num: Of layouts of each program.

    Yields:
        The program with how its gradients are laid out, "at once" or "in steps", and what was wrong.
    """
    r = random.Random(0)
    with jax.enable_x64(True):
        for name, loss, x, weights in _programs():
            specs = [[s for s in all_specs(w.ndim, AXES) if _divides(s, w.shape)] for w in weights]
            for _ in range(num):
                mesh = ts.make_mesh(**dict.fromkeys(r.sample(AXES, 3), 2))
                chosen = [r.choice(fitting) for fitting in specs]
                for how in ("at once", "in steps"):
                    if fault := _fault(loss, x, weights, chosen, mesh=mesh, in_steps=how == "in steps"):
                        yield f"{name}, {how}", f"{', '.join(map(str, mesh.axis_names))}: {chosen}: {fault}"


def _programs() -> Iterator[tuple[str, Loss, np.ndarray, list[np.ndarray]]]:
    rng = np.random.default_rng(0)

    def products(first: jax.Array, second: jax.Array, x: jax.Array) -> jax.Array:
        return ((jax.numpy.tanh(x @ first.T) @ second.T) ** 2).sum()

    def convolutions(first: jax.Array, second: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, first, (1,), [(1, 1)])
        return (jax.lax.conv_general_dilated(jax.numpy.tanh(y), second, (2,), [(0, 0)]) ** 2).sum()

    yield "products", products, rng.standard_normal((8, 16)), [rng.standard_normal((16, 16)) for _ in range(2)]
    kernels = [rng.standard_normal((16, 16, size)) for size in (4, 2)]
    yield "convolutions", convolutions, rng.standard_normal((8, 16, 12)), kernels


def _divides(spec: P, shape: tuple[int, ...]) -> bool:
    return all(size % 2 ** len(axes_of((part,))) == 0 for size, part in zip(shape, spec, strict=True))


def _fault(
    loss: Loss, x: np.ndarray, weights: list[np.ndarray], specs: list[P], *, mesh: Mesh, in_steps: bool
) -> str | None:
    placed = [NamedSharding(mesh, spec) for spec in specs]

    def run(first: jax.Array, second: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value, grads = jax.value_and_grad(loss, (0, 1))(first, second, x)
        stacks = Stacks(Layout.of([("first",), ("second",)]), grads)
        return value, constrain_stacks(stacks, placed, ("batch",)).arrays if in_steps else grads

    program = jax.jit(
        run,
        in_shardings=(*placed, NamedSharding(mesh, P("batch"))),
        out_shardings=(NamedSharding(mesh, P()), tuple(placed)),
    )
    try:
        found = jax.tree.leaves(program(*weights, x))
    except Exception as error:
        return str(error).splitlines()[0]
    wanted = jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(*weights, x))
    far = [float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in zip(found, wanted, strict=True)]
    return None if max(far) <= EXACT else ", ".join(f"{size:.0e}" for size in far)
