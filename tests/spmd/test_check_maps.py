"""What jax_shard_map, jax_pmap and jax_vmap take, and how they refuse what they do not."""

import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.spmd.mapping import assert_close, shard_map

X = torch.arange(8.0)


def fail_with(*words: str) -> Any:
    return pytest.raises(
        (TypeError, ValueError, NameError, NotImplementedError), match=".*".join(map(re.escape, words))
    )


BAD_MAPS = {
    "unknown axis out": (
        lambda: shard_map(torch.sin, P("i"), P("I")),
        ["out_specs: P('I') names an axis that the mesh lacks. Its axes are 'i', 'j'"],
    ),
    "no spec": (
        lambda: shard_map(torch.sin, (None,), P()),
        ["in_specs[0] must be a jax.sharding.PartitionSpec, got None"],
    ),
    "axis twice": (lambda: shard_map(torch.sin, P("i", "i"), P()), ["names 'i' more than once"]),
    "not among axis_names": (
        lambda: shard_map(torch.sin, P("i"), P("i"), axis_names={"j"}),
        ["P('i') names 'i', which is not among axis_names"],
    ),
    "rank": (
        lambda: shard_map(lambda x: x, P("i", "j"), P())(X),
        ["x (8,): P('i', 'j') is longer than the rank, 2 > 1"],
    ),
    "size": (
        lambda: shard_map(lambda x, y: x, (P(), {"a": P("i")}), P())(X, {"a": torch.ones(6)}),
        ["y['a'] (6,): dim 0 = 6 is not a multiple of i=4", "Pad dim 0 to 8"],
    ),
    "keyword": (lambda: shard_map(lambda x: x, P(), P())(x=X), ["in_specs are by position, got the keyword 'x'"]),
    "structure of arguments": (
        lambda: shard_map(lambda x: x, ({"a": P()},), P())({"b": X}),
        ["in_specs must have the structure of the arguments", "'a'", "'b'"],
    ),
    "structure of results": (
        lambda: shard_map(lambda x: (x, x), P("i"), {"a": P("i")})(X),
        ["out_specs must have the structure of the results"],
    ),
    "result varies": (
        lambda: shard_map(lambda x: {"out": x.sum()}, P(("i", "j")), P())(X),
        ["result['out'] of local shape (): P() says that it is the same along 'i' and 'j'", "psum"],
    ),
    "rank of the result": (
        lambda: shard_map(lambda x: x.sum(), P("i"), P("i"))(X),
        ["result of local shape (): P('i') is longer than its rank 0"],
    ),
    "result is not a tensor": (
        lambda: shard_map(lambda x: (x, "a"), P("i"), P("i"))(X),
        ["result[1] is 'a'. Return tensors"],
    ),
    "nested over the same axes": (
        lambda: shard_map(shard_map(torch.sin, P("j"), P("j")), P("i"), P("i"))(X),
        ["'i', 'j' are mapped already", "fewer axis_names"],
    ),
    "pmap over devices": (
        lambda: ts.jax_pmap(lambda x: x, devices=jax.devices()[:2])(torch.ones(3)),
        ["x has size 3", "there are 2 devices"],
    ),
    "mapped sizes": (
        lambda: ts.jax_pmap(lambda x, y: x)(X, {"a": torch.ones(4)}),
        ["jax_pmap: the mapped dims must have one size, got x: 8, y['a']: 4"],
    ),
    "in_axes structure": (
        lambda: ts.jax_vmap(lambda x: x, in_axes=({"a": 0},))({"b": X}),
        ["the in_axes of x", "must be an int or None, or have the structure of the argument"],
    ),
    "unhashable static": (
        lambda: ts.jax_pmap(lambda x, n: x, static_broadcasted_argnums=1)(X, [1, 2]),
        ["jax_pmap: the static argument n is a list, which is not hashable"],
    ),
    "static tensor": (
        lambda: ts.jax_pmap(lambda x, n: x, static_broadcasted_argnums=1)(X, X),
        ["the static argument n is a tensor"],
    ),
    "a string to shard": (
        lambda: shard_map(lambda x: x, P(), P())({"a": "b"}),
        ["jax_shard_map: x['a'] is 'b', which"],
    ),
    "other devices": (
        lambda: shard_map(lambda x, y: x, P("i"), P("i"))(X, {"a": committed_to(jax.devices()[2:4])}),
        ["jax_shard_map: y['a'] (8,) lies on devices [2, 3], and the function runs on devices [0, 1,", "cpu()"],
    ),
    "devices in another order": (
        lambda: shard_map(lambda x: x, P("i"), P("i"))(committed_to(jax.devices()[::-1])),
        ["x (8,) lies on devices [7, 6,", "runs on devices [0, 1,"],
    ),
    "an argument on an explicit mesh": (
        lambda: shard_map(torch.sin, P("i"), P("i"))(
            jax.device_put(np.ones(8, np.float32), NamedSharding(jax.make_mesh((8,), ("z",)), P("z")))
        ),
        ["jax_shard_map: argument 0: every mesh axis must be Auto", "'z' is Explicit"],
    ),
    "pmap within": (
        lambda: shard_map(ts.jax_pmap(torch.sin), P("i"), P("i"))(X),
        ["jax_pmap: a map around", "jax_vmap"],
    ),
    "tpmap within": (lambda: ts.jax_pmap(ts.tpmap(torch.sin, "i", ["shard"]))(X.view(8, 1)), ["tpmap: a map around"]),
    "shard_map within": (
        lambda: ts.jax_pmap(shard_map(torch.sin, P("i"), P("i")))(X.view(2, 4)),
        ["here devices are mapped already, by a map around this one"],
    ),
    "out_axes structure": (lambda: ts.jax_pmap(torch.sin, out_axes=(0, 0))(X), ["jax_pmap: out_axes (0, 0) must be"]),
    "row of a string": (lambda: ts.jax_vmap(lambda x: (x, "a"))(X), ["jax_vmap: result[1] is 'a'. Return tensors"]),
    "row of a string on a device": (lambda: ts.jax_pmap(lambda x: "a")(X), ["jax_pmap: result is 'a'. Return tensors"]),
    "no rows": (lambda: ts.jax_pmap(lambda x: x)(torch.ones(0)), ["jax_pmap: x has size 0 along", "one row at least"]),
    "a device twice": (lambda: ts.jax_pmap(torch.sin, devices=jax.devices()[:1] * 2), ["of different JAX devices"]),
    "mapped sizes by name": (
        lambda: ts.jax_pmap(lambda x, *, y: x)(X, y=torch.ones(4)),
        ["jax_pmap: the mapped dims must have one size, got x: 8, y: 4"],
    ),
}


def committed_to(devices: list[jax.Device]) -> torch.Tensor:
    mesh = jax.sharding.Mesh(devices, ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    return ts.torch_view(jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("z"))))


@pytest.mark.parametrize("name", BAD_MAPS)
def test_bad_maps_are_refused_with_a_reason(name: str) -> None:
    call, words = BAD_MAPS[name]
    with fail_with(*words):
        call()


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


@pytest.mark.parametrize("name", ["values", "fn", "key"])
@pytest.mark.parametrize("adapt", [ts.jax_vmap, ts.jax_pmap, ts.jax_jit, ts.jax_grad, ts.jax_checkpoint])
def test_arguments_may_have_any_name(adapt: Any, name: str) -> None:
    def fn(x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return (x * named[name]).sum()

    (wanted,) = torch.func.grad(fn, (0,))(X, **{name: X}) if adapt is ts.jax_grad else (fn(X, **{name: X}),)
    found = adapt(fn)(X, **{name: X})
    assert_close(found, X * X if adapt in (ts.jax_vmap, ts.jax_pmap) else wanted)
