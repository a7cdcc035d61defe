"""What a plan says about the sequence of a batch, checked against the mesh."""

import pytest
from jax.sharding import PartitionSpec as P

import torch_shard as ts

MESH = ts.make_mesh(model=8)


@pytest.mark.parametrize("context", [ts.Context("batch", rows=("model",)), ts.Context("model", rows=("replica",))])
def test_an_axis_that_the_mesh_lacks_is_refused(context: ts.Context) -> None:
    with pytest.raises(ValueError, match=r"the mesh \(model=8\) has no axis"):
        ts.ShardingPlan({}, default=P(), context=context).resolve({}, MESH)


def test_a_mesh_may_lack_the_axis_of_the_rows() -> None:
    plan = ts.ShardingPlan({}, default=P(), context=ts.Context("model")).resolve({}, MESH)
    assert plan.context is not None
    assert plan.context.rows_on(MESH) == ()


def test_the_argument_of_a_wrong_mode_is_named() -> None:
    with pytest.raises(
        ValueError, match=': mode of the context must be one of "gather", "heads", "ring", got \'rings\''
    ):
        ts.Context("context", mode="rings")  # pyright: ignore[reportArgumentType]
