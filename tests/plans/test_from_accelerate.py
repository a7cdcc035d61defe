"""Configs of accelerate as meshes, plans and batch specs."""

import types

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import mean_square
from tests.plans.test_from_hf import tiny

CASES = [
    # sizes, the axes of the mesh, how a weight is stored, how the batch is split
    ({}, {"dp_replicate": 8}, P(), P("dp_replicate")),
    ({"dp_shard": 8}, {"dp_shard": 8}, P("dp_shard", None), P("dp_shard")),
    (
        {"dp_shard": 4, "dp_replicate": 2},
        {"dp_replicate": 2, "dp_shard": 4},
        P("dp_shard", None),
        P(("dp_replicate", "dp_shard")),
    ),
    ({"cp": 2, "dp_shard": 4}, {"dp_shard": 4, "cp": 2}, P(("dp_shard", "cp"), None), P("dp_shard", "cp")),
    ({"cp": 4}, {"cp": 4}, P("cp", None), P(None, "cp")),
    ({"sp": 2, "dp_shard": 2}, {"dp_shard": 2, "sp": 2}, P(("dp_shard", "sp"), None), P("dp_shard", "sp")),
]


@pytest.mark.parametrize(("sizes", "axes", "stored", "rows"), CASES)
@pytest.mark.parametrize("kind", ["attributes", "environment", "accelerate"])
def test_sizes_are_a_mesh_a_plan_and_a_batch_spec(sizes, axes, stored, rows, kind, monkeypatch):
    config = None
    if kind == "attributes":
        config = types.SimpleNamespace(**{"tp_size": None, **{f"{axis}_size": size for axis, size in sizes.items()}})
    elif kind == "accelerate":
        accelerate = pytest.importorskip("accelerate.parallelism_config")
        config = accelerate.ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    else:
        for axis, size in sizes.items():
            monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", str(size))
    model = nn.Linear(16, 16)
    mesh, plan, batch_spec = ts.plans.from_accelerate(model, config)
    assert list(mesh.shape.items()) == list(axes.items())
    assert plan.resolve(model, mesh)["weight"].spec == stored
    assert batch_spec == rows


def test_tensor_parallelism_is_that_of_the_model():
    model = tiny("Llama")
    config = types.SimpleNamespace(dp_shard_size=2, cp_size=2, tp_size=2)
    mesh, plan, batch_spec = ts.plans.from_accelerate(model, config)
    assert list(mesh.shape) == ["dp_shard", "cp", "tp"]
    assert plan == ts.plans.from_hf(model, mesh, tp="tp", fsdp=("dp_shard", "cp"))
    assert plan.resolve(model, mesh)["model.layers.0.mlp.up_proj.weight"].spec == P("tp", ("dp_shard", "cp"))
    assert batch_spec == P("dp_shard", "cp")
    wrapped = nn.ModuleDict({"within": model})  # whose own attributes have no plan
    within = ts.plans.from_accelerate(wrapped, config)[1].resolve(wrapped, mesh)
    assert within["within.model.layers.0.mlp.up_proj.weight"].spec == P("tp", ("dp_shard", "cp"))


def test_a_step_of_it_gives_what_eager_torch_gives():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(8, 4, 8)
    config = types.SimpleNamespace(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    mesh, plan, batch_spec = ts.plans.from_accelerate(model, config)
    close = {"rtol": 1e-5, "atol": 1e-7}  # sums in another order
    agrees_with_torch(model, mean_square, [x], mesh, plan=plan, batch_spec=batch_spec, **close)


def test_all_sizes_that_cannot_be_read_are_said_together(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    config = types.SimpleNamespace(dp_replicate_size=0, dp_shard_size=True, cp_size=2, sp_size=2)
    with pytest.raises(ValueError, match="sizes of the config cannot be read") as error:
        ts.plans.from_accelerate(nn.Linear(2, 2), config)
    assert [line.strip() for line in str(error.value).splitlines()[2:]] == [
        "dp_replicate_size must be a positive integer, got 0.",
        "dp_shard_size must be a positive integer, got True.",
        "tp_size must be a positive integer, got 'two'.",
        "cp_size=2 and sp_size=2 both split the sequence. Choose one.",
    ]


def test_a_model_without_a_plan_of_its_own_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"from_accelerate: tp_size=2, and Linear has no tp_plan.* Use tp_size=1"):
        ts.plans.from_accelerate(nn.Linear(2, 2), types.SimpleNamespace(tp_size=2))
