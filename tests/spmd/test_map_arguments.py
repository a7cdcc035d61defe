"""What jax_shard_map, jax_pmap and jax_vmap take, and how they refuse what they do not."""

# ruff: noqa: E501  (a table)

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.errors import assert_refused
from tests.spmd.mapping import assert_close, shard_map  # noqa: F401  (in the table)

X = torch.arange(8.0)


BAD_MAPS = {
    "shard_map(shard_map(torch.sin, P('j'), P('j')), P('i'), P('i'))(X)": "ValueError: jax_shard_map: a map around this one .*'i', 'j'.*fewer "
    "axis_names",
    "shard_map(shard_map(torch.sin, P(), P(), axis_names='i'), P('i'), P('i'), axis_names='i')(X)": "ValueError: .*a map around this one",
    "shard_map(ts.jax_shard_map(torch.sin, mesh=ts.make_mesh(i=2, j=2), in_specs=P('j'), out_specs=P('j')), P('i'), P('i'), axis_names='i')(X)": "Valu"
    r"eError: .*a map around this one has the axes \('i',\) of \{'i': 4, 'j': 2\}.*has the mesh \(i=2, j=2\)",
    "ts.jax_pmap(shard_map(torch.sin, P('i'), P('i')))(X.view(2, 4))": "ValueError: jax_shard_map: a map around this one",
    "shard_map(torch.sin, P('i'), P('i'))(on_an_explicit_mesh())": "ValueError: jax_shard_map: every mesh axis must be Auto.*"
    "'z' is Explicit",
    "ts.jax_pmap(torch.sin, devices=jax.devices()[:1] * 2)": "ValueError: .*of different JAX devices",
}

BAD_FOR_JAX = {
    "shard_map(lambda x: {'out': x.sum()}, P(('i', 'j')), P())(X)": "ValueError: .*require replication",
    "shard_map(lambda x, y: x, P('i'), P('i'))(X, torch.ones(6))": r"ValueError: .*evenly divisible.*args\[1\]",
    "shard_map(lambda x, y: x + y[0], P('i'), P('i'))(X, committed_to(jax.devices()[2:4]))": "ValueError: Received incompatible devices",
    "shard_map(lambda x: x, P('i'), P('i'))(committed_to(jax.devices()[::-1]))": "ValueError: Received incompatible devices",
    "shard_map(ts.jax_pmap(torch.sin), P('i'), P('i'))(X)": "ValueError: The context mesh .* should match",
    "shard_map(ts.tpmap(torch.sin, 'i', ['shard']), P('i'), P('i'))(torch.ones(64))": "ValueError: The context mesh .* should match",
    "ts.jax_pmap(lambda x, y: x + y.sum())(torch.ones(4), X)": "ValueError: cannot select an axis to squeeze out",
    "ts.jax_pmap(lambda x: x.sum())(torch.ones(16, 2))": "ValueError: cannot select an axis to squeeze out",
    "ts.jax_pmap(lambda x: x + torch.rand(()), fold_in_axes='i')(X)": "NameError: Found an unbound axis name: i",
    "ts.jax_pmap(lambda x, n: x, static_broadcasted_argnums=1)(X, [1, 2])": r"ValueError: .*Static argument \(index 1\) of type <class 'list'>",
    "ts.jax_vmap(lambda x, y: x, axis_size=7)(X, X)": "ValueError: vmap got inconsistent sizes.*axis 0 of argument x",
    "ts.jax_vmap(lambda x, y: x)(X, {'a': X[:4]})": r"ValueError: vmap got inconsistent sizes.*axis 0 of argument y\['a'\]",
    "ts.jax_vmap(lambda x: x, in_axes=(0, 0))(X)": r"ValueError: vmap in_axes .* got len\(in_axes\)=2, len\(args\)=1",
}
"""What JAX refuses by itself, in words of its own that count arguments as the user does."""


def committed_to(devices: list[jax.Device]) -> torch.Tensor:
    mesh = jax.sharding.Mesh(devices, ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    return ts.torch_view(jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("z"))))


def on_an_explicit_mesh() -> jax.Array:
    return jax.device_put(np.ones(8, np.float32), NamedSharding(jax.make_mesh((8,), ("z",)), P("z")))


@pytest.mark.parametrize("table", [BAD_MAPS, BAD_FOR_JAX], ids=["by us", "by JAX"])
def test_bad_maps_are_refused_with_a_reason(table: dict[str, str]) -> None:
    assert_refused(table, lambda text: eval(text))


def test_a_single_name_stands_for_a_tuple_of_one() -> None:
    mesh = ts.make_mesh(batch=4, model=2)
    fn = ts.jax_shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), axis_names="batch")
    assert_close(fn(X), 2 * X)


def test_static_arguments_are_counted_from_the_last_too() -> None:
    assert_close(ts.jax_pmap(lambda x, n: x * n, static_broadcasted_argnums=-1)(X, 3), 3 * X)


@pytest.mark.parametrize("adapt", [ts.jax_vmap, ts.jax_pmap], ids=["vmap", "pmap"])
def test_nothing_is_a_tree_without_leaves(adapt: Any) -> None:
    doubled, nothing = adapt(lambda x, y: (2 * x, y))(X, None)
    assert_close(doubled, 2 * X)
    assert nothing is None


@pytest.mark.parametrize("adapt", [ts.jax_vmap, ts.jax_pmap, ts.jax_jit, ts.jax_grad, ts.jax_checkpoint])
def test_arguments_may_have_any_name(adapt: Any) -> None:
    def fn(x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return (x * named["values"] * named["fn"] * named["key"]).sum()

    found = adapt(fn)(X, values=X, fn=X, key=X)
    by_row = {ts.jax_vmap: X**4, ts.jax_pmap: X**4, ts.jax_grad: X**3}
    assert_close(found, by_row.get(adapt, (X**4).sum()))
