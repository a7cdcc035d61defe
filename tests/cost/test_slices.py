"""Several TPU slices, which a slower network joins: what the compiler makes of meshes over them."""

import re

import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of

pytest.importorskip("libtpu", reason="pip install 'torch_shard[tpu]'")

HIDDEN = 512


def mesh_of(**sizes: int) -> Mesh:
    return ts.make_mesh(topology="v5e:2x2", num_slices=2, **sizes)


@pytest.mark.parametrize("sizes", [{"replica": 2, "batch": 4}, {"batch": 8}, {"batch": 4, "model": 2}], ids=str)
def test_the_first_axis_goes_from_slice_to_slice(sizes: dict[str, int]) -> None:
    mesh = mesh_of(**sizes)
    slices = [[device.slice_index for device in part.flat] for part in mesh.devices.reshape(2, -1)]
    assert slices == [[0] * 4, [1] * 4]


def test_what_no_slices_can_be_laid_out_as_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"devices of 2 slices, over which the first axis goes: model must be a multiple"
    ):
        mesh_of(model=1, batch=8)
    with pytest.raises(ValueError, match="num_slices must be a positive integer beside topology="):
        ts.make_mesh(num_slices=2, batch=2)


@pytest.mark.slow  # compiles for TPUs
def test_hybrid_sharding_sends_gradients_alone_between_slices() -> None:
    mesh = mesh_of(replica=2, batch=4)
    model = nn.Sequential(nn.Linear(256, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 256))
    x, both = torch.empty(64, 256, device="meta"), ("replica", "batch")
    hybrid = step_of(model, mean_square, mesh=mesh, plan=ts.plans.hsdp(model, mesh)).preview(x)
    whole = ts.plans.fsdp(model, mesh, fsdp=both)
    everywhere = step_of(model, mean_square, mesh=mesh, plan=whole, batch_spec=P(both)).preview(x)
    found = [
        set(re.findall(r'_xla_megascale_transfer_type="(\w+)"', p.compiled.as_text())) for p in (hybrid, everywhere)
    ]
    assert "ALL_GATHER" not in found[0]
    assert "ALL_GATHER" in found[1]
    gradients = 4 * 2 * 256 * HIDDEN // 4  # float32, of which each device of a slice has a quarter
    assert gradients <= hybrid.between_slices < 1.1 * gradients  # and of biases
    assert everywhere.between_slices > 2 * hybrid.between_slices
    with pytest.raises(AssertionError, match="bytes between slices, at most 1,000 allowed"):
        hybrid.assert_at_most(between_slices=1000)
