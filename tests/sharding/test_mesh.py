import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from torch_shard._sharding.mesh import check_mesh, find_spec_faults, make_mesh

PARTS = [None, "batch", "model", "modle", ("batch", "model"), ("model", "batch")]

specs = st.lists(st.sampled_from(PARTS), max_size=4).map(lambda parts: P(*parts))

shapes = st.lists(st.integers(0, 17), max_size=3).map(tuple)


def jax_accepts(spec, shape, mesh) -> bool:
    try:
        jax.device_put(np.zeros(shape), NamedSharding(mesh, spec))
    except Exception:  # JAX's DuplicateSpecError is private and no ValueError
        return False
    return True


@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4), (1, 8)], ids=str)
def test_make_mesh_has_the_sizes_and_all_devices_in_order(sizes):
    mesh = make_mesh(batch=sizes[0], model=sizes[1])
    assert dict(mesh.shape) == {"batch": sizes[0], "model": sizes[1]}
    assert mesh.devices.tolist() == np.array(jax.devices()).reshape(sizes).tolist()


def test_make_mesh_says_which_devices_stay_idle(caplog):
    make_mesh(batch=3)
    (said,) = caplog.messages
    assert said.startswith("make_mesh: (batch=3) takes 3 of the 8 devices, and the others stay idle.")
    assert "devices=jax.devices()[:3]" in said
    make_mesh(jax.devices()[:3], batch=3)
    make_mesh(batch=4, model=-1)
    assert caplog.messages == [said]


def test_make_mesh_keeps_any_names_in_the_order_given_and_has_auto_axes():
    mesh = make_mesh(tensor=2, stage=2, data=2)
    assert mesh.axis_names == ("tensor", "stage", "data")
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_make_mesh_uses_the_first_devices_when_it_needs_fewer():
    assert make_mesh(batch=1, model=1).devices.tolist() == [[jax.devices()[0]]]
    last = jax.devices()[4:]
    assert make_mesh(last, batch=2).devices.tolist() == last[:2]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [({"batch": -1}, (8,)), ({"batch": -1, "model": 2}, (4, 2)), ({"batch": 8, "model": -1}, (8, 1))],
    ids=str,
)
def test_make_mesh_gives_minus_one_the_rest(sizes, shape):
    assert make_mesh(**sizes).axis_sizes == shape


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"a": True, "b": "2"}, TypeError, "make_mesh: every axis size must be an int, got a=True, b='2'."),
        ({"a": 0, "b": -2, "c": 2}, ValueError, "must be positive, or -1 for the rest, got a=0, b=-2."),
        ({"a": -1, "b": 16}, ValueError, "their product 16 does not divide the 8 devices available."),
        ({"a": 4, "b": 4}, ValueError, "make_mesh: a=4, b=4 needs 16 devices, but 8 are available."),
        ({"a": 9}, ValueError, 'jax.config.update("jax_num_cpu_devices", 9) before JAX starts'),
    ],
    ids=str,
)
def test_make_mesh_refuses_sizes_with_a_reason(sizes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make_mesh(**sizes)


def test_make_mesh_counts_the_devices_that_it_is_given():
    with pytest.raises(ValueError, match="batch=4 needs 4 devices, but 2 are available"):
        make_mesh(jax.devices()[:2], batch=4)


def test_check_mesh_refuses_an_abstract_mesh():
    with pytest.raises(TypeError, match=r"torch_shard: mesh must be a jax.sharding.Mesh, got AbstractMesh. Build one"):
        check_mesh(AbstractMesh((8,), ("batch",)))


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        (None, "'batch' is Explicit, 'model' is Explicit"),
        ((AxisType.Auto, AxisType.Explicit), "'model' is Explicit"),
        ((AxisType.Manual, AxisType.Auto), "'batch' is Manual"),
    ],
    ids=str,
)
def test_check_mesh_refuses_other_axes_with_reason_and_fix(kinds, found):
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=kinds)
    with pytest.raises(ValueError, match=f"torch_shard: every mesh axis must be Auto, .*, but {found}. ") as caught:
        check_mesh(mesh)
    assert "jax.make_mesh gives Explicit axes by default" in str(caught.value)
    assert "torch_shard.make_mesh(batch=4, model=2) or pass axis_types=(AxisType.Auto,) * 2" in str(caught.value)


@given(specs, shapes)
def test_a_spec_has_faults_exactly_where_jax_refuses_it(spec, shape):
    mesh = make_mesh(batch=4, model=2)
    assert (find_spec_faults(spec, shape, mesh) == []) == jax_accepts(spec, shape, mesh)


@given(specs, shapes)
def test_every_remedy_helps(spec, shape):
    mesh = make_mesh(batch=4, model=2)
    for fault, remedy in find_spec_faults(spec, shape, mesh):
        for use in re.findall(r"Use (P\(.*?\))(?:, pad|\.$)", remedy):
            assert jax_accepts(eval(use), shape, mesh), (fault, remedy)
        for dim, size in re.findall(r"[pP]ad dim (\d) to (\d+)", remedy):
            assert int(size) % math.prod(mesh.shape[axis] for axis in np.atleast_1d(spec[int(dim)])) == 0
            assert shape[int(dim)] < int(size) < shape[int(dim)] + 8


@pytest.mark.parametrize(
    ("spec", "shape", "pairs"),
    [
        (P("x"), (8,), [("P('x') names an axis that the mesh lacks", "Its axes are 'batch', 'model'.")]),
        (P(None, "model"), (7,), [("P(None, 'model') is longer than the rank, 2 > 1", "Use P().")]),
        (
            P("model"),
            (7, 9, 6),
            [
                (
                    "dim 0 = 7 is not a multiple of model=2",
                    "Use P(None, None, 'model'), pad dim 0 to 8, or replicate it with P().",
                )
            ],
        ),
        (
            P(("batch", "model")),
            (12, 3),
            [
                (
                    "dim 0 = 12 is not a multiple of batch=4 * model=2 = 8",
                    "Pad dim 0 to 16, or replicate it with P().",
                )
            ],
        ),
    ],
    ids=str,
)
def test_faults_say_what_was_found_and_what_to_do(spec, shape, pairs):
    assert find_spec_faults(spec, shape, make_mesh(batch=4, model=2)) == pairs
