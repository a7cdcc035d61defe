"""Communication that a TPU waits for, in programs of plain JAX whose schedule is plain to see."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from torch_shard._cost.chips import CHIPS
from torch_shard._cost.exposed import exposed_by_axis
from torch_shard._cost.hlo import Hlo
from torch_shard._cost.total import costs_of

pytestmark = pytest.mark.usefixtures("optimized")

CHIP = CHIPS["TPU v5 lite"]
SHIFT = [(i, (i + 1) % 4) for i in range(4)]


def on_chips() -> Mesh:
    return ts.make_mesh(topology="v5e:2x2", batch=4)


def compiled(fn: Any, out_specs: Any) -> str:
    """The program of a function of rows, split over four devices, and a matrix."""
    mesh = on_chips()
    shapes = (((8192, 1024), P("batch")), ((1024, 1024), P()))
    given = [jax.ShapeDtypeStruct(s, np.float32, sharding=NamedSharding(mesh, spec)) for s, spec in shapes]
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("batch"), P()), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*given).compile().as_text() or ""


def travel(text: str) -> float:
    """Cycles of all collectives, one after the other."""
    return sum(cost.received_bytes for cost in costs_of(text)) / CHIP.link * (CHIP.clock or 0)


def waited(text: str) -> int:
    return sum((exposed_by_axis(text, on_chips()) or {}).values())


def test_what_is_needed_at_once_is_waited_for() -> None:
    text = compiled(lambda x, w: jax.lax.psum(x, "batch"), P())
    assert exposed_by_axis(text, on_chips()) == {"batch": pytest.approx(travel(text), rel=1e-3)}
    assert exposed_by_axis(text, ts.make_mesh(batch=4, model=2)) is None  # of CPUs


def test_what_travels_beside_products_is_not() -> None:
    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = jax.lax.all_gather(x, "batch", tiled=True)
        for _ in range(20):
            x = jnp.tanh(x @ w)
        return x, gathered

    text = compiled(fn, (P("batch"), P()))
    assert travel(text) > 0
    assert waited(text) == 0


def test_a_loop_waits_in_each_iteration() -> None:
    def fn(length: int) -> Any:
        def body(x: jax.Array, w: jax.Array) -> jax.Array:
            step = lambda x, _: (jax.lax.ppermute(jnp.tanh(x @ w), "batch", SHIFT), None)  # noqa: E731
            return jax.lax.scan(step, x, None, length=length)[0]

        return body

    short, long = (waited(compiled(fn(length), P("batch"))) for length in (3, 9))
    assert short > 0
    assert long == pytest.approx(3 * short, rel=0.01)


def test_what_travels_beside_a_loop_is_counted_once() -> None:
    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        around = jax.lax.all_gather(x, "batch", tiled=True)
        few = jax.lax.scan(lambda rows, _: (jnp.tanh(rows @ w), None), x[:16], None, length=256)[0]
        return few, jnp.tanh(around @ w)

    text = compiled(fn, (P("batch"), P()))
    (loop,) = (instruction for instruction in Hlo(text).computations[Hlo(text).entry] if instruction.op == "while")
    body = Hlo(text).computations[loop.find(r"body=%?([\w.\-]+)") or ""]
    assert any("collective" in called for instruction in body for called in Hlo(text).called(instruction))
    assert waited(text) == 0  # of a gather of which each iteration sends a part
