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
    "shard_map(torch.sin, P('i'), P('I'))": r"ValueError: .*out_specs: P\('I'\) names an axis that the mesh lacks. Its axes are 'i', 'j'",
    "shard_map(torch.sin, (None,), P())": r"TypeError: .*in_specs\[0\] must be a jax.sharding.PartitionSpec, got None",
    "shard_map(torch.sin, P('i', 'i'), P())": "ValueError: .*names 'i' more than once",
    "shard_map(torch.sin, P('i'), P('i'), axis_names={'j'})": r"ValueError: .*P\('i'\) names 'i', which is not among axis_names",
    "shard_map(lambda x: x, P('i', 'j'), P())(X)": r"ValueError: .*x \(8,\): P\('i', 'j'\) is longer than the rank, 2 > 1",
    "shard_map(lambda x, y: x, (P(), {'a': P('i')}), P())(X, {'a': torch.ones(6)})": r"ValueError: .*y\['a'\] \(6,\): dim 0 = 6 is "
    "not a multiple of i=4.*Pad dim 0 to 8",
    "shard_map(lambda x: x, P(), P())(x=X)": "TypeError: .*in_specs are by position, got the keyword 'x'",
    "shard_map(lambda x: x, ({'a': P()},), P())({'b': X})": "TypeError: .*in_specs must have the structure of the arguments.*'a'.*'b'",
    "shard_map(lambda x: (x, x), P('i'), {'a': P('i')})(X)": "TypeError: .*out_specs must have the structure of the results",
    "shard_map(lambda x: {'out': x.sum()}, P(('i', 'j')), P())(X)": r"ValueError: .*result\['out'\] of local shape \(\): P\(\) says that "
    "it is the same along 'i' and 'j'.*psum",
    "shard_map(lambda x: x.sum(), P('i'), P('i'))(X)": r"ValueError: .*result of local shape \(\): P\('i'\) is longer than its rank 0",
    "shard_map(lambda x: (x, 'a'), P('i'), P('i'))(X)": r"ValueError: .*result\[1\] is 'a'. Return tensors",
    "shard_map(shard_map(torch.sin, P('j'), P('j')), P('i'), P('i'))(X)": "ValueError: .*'i', 'j' are mapped already.*fewer axis_names",
    "shard_map(lambda x: x, P(), P())({'a': 'b'})": r"TypeError: jax_shard_map: x\['a'\] is 'b', which",
    "shard_map(lambda x, y: x, P('i'), P('i'))(X, {'a': committed_to(jax.devices()[2:4])})": r"ValueError: jax_shard_map: y\['a'\] \(8,\) "
    r"lies on devices \[2, 3\], and the function runs on devices \[0, 1,.*cpu\(\)",
    "shard_map(lambda x: x, P('i'), P('i'))(committed_to(jax.devices()[::-1]))": r"ValueError: .*x \(8,\) lies on devices \[7, 6,.*"
    r"runs on devices \[0, 1,",
    "shard_map(torch.sin, P('i'), P('i'))(on_an_explicit_mesh())": "ValueError: jax_shard_map: argument 0: every mesh axis must be Auto.*"
    "'z' is Explicit",
    "shard_map(ts.jax_pmap(torch.sin), P('i'), P('i'))(X)": "ValueError: jax_pmap: a map around.*jax_vmap",
    "ts.jax_pmap(ts.tpmap(torch.sin, 'i', ['shard']))(X.view(8, 1))": "ValueError: tpmap: a map around",
    "ts.jax_pmap(shard_map(torch.sin, P('i'), P('i')))(X.view(2, 4))": "ValueError: .*here devices are mapped already, by a map around this one",
    "ts.jax_pmap(lambda x: x, devices=jax.devices()[:2])(torch.ones(3))": "ValueError: .*x has size 3.*there are 2 devices",
    "ts.jax_pmap(lambda x, y: x)(X, {'a': torch.ones(4)})": r"ValueError: jax_pmap: the mapped dims must have one size, got x: 8, y\['a'\]: 4",
    "ts.jax_pmap(lambda x, *, y: x)(X, y=torch.ones(4))": "ValueError: jax_pmap: the mapped dims must have one size, got x: 8, y: 4",
    "ts.jax_pmap(lambda x, n: x, static_broadcasted_argnums=1)(X, [1, 2])": "TypeError: jax_pmap: the static argument n is a list, which is not "
    "hashable",
    "ts.jax_pmap(lambda x, n: x, static_broadcasted_argnums=1)(X, X)": "TypeError: .*the static argument n is a tensor",
    "ts.jax_pmap(torch.sin, out_axes=(0, 0))(X)": r"TypeError: jax_pmap: out_axes \(0, 0\) must be",
    "ts.jax_pmap(lambda x: 'a')(X)": "ValueError: jax_pmap: result is 'a'. Return tensors",
    "ts.jax_pmap(lambda x: x)(torch.ones(0))": "ValueError: jax_pmap: x has size 0 along.*one row at least",
    "ts.jax_pmap(torch.sin, devices=jax.devices()[:1] * 2)": "ValueError: .*of different JAX devices",
    "ts.jax_vmap(lambda x: x, in_axes=({'a': 0},))({'b': X})": "TypeError: .*the in_axes of x.*must be an int or None, or have the structure of "
    "the argument",
    "ts.jax_vmap(lambda x: (x, 'a'))(X)": r"ValueError: jax_vmap: result\[1\] is 'a'. Return tensors",
}


def committed_to(devices: list[jax.Device]) -> torch.Tensor:
    mesh = jax.sharding.Mesh(devices, ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    return ts.torch_view(jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("z"))))


def on_an_explicit_mesh() -> jax.Array:
    return jax.device_put(np.ones(8, np.float32), NamedSharding(jax.make_mesh((8,), ("z",)), P("z")))


def test_bad_maps_are_refused_with_a_reason() -> None:
    assert_refused(BAD_MAPS, lambda text: eval(text))


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
