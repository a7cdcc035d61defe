"""Meshes of accelerators that are not there; nothing is put on them."""

import importlib.util
import os

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from torch_shard._sharding.topology import GPUS, TPUS, memory_of

NAMES = [f"{chip}:{shape}" for chip, tpu in TPUS.items() for shape in tpu.shapes]
NUM_CHIPS = {name: int(np.prod([int(size) for size in name.split(":")[1].split("x")])) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_topology_has_its_devices(name: str) -> None:
    per_chip, before = 2 if name.startswith("tpu7x") else 1, dict(os.environ)  # as JAX counts them
    mesh = ts.make_mesh(topology=name, batch=NUM_CHIPS[name] * per_chip)
    assert {device.platform for device in mesh.devices.flat} == {"tpu"}
    assert mesh.axis_types == (AxisType.Auto,)
    assert memory_of(mesh.devices.flat[0]) == TPUS[name.split(":")[0]].memory
    assert {device.platform for device in jax.devices()} == {"cpu"}
    assert dict(os.environ) == before  # what is started later does not take this machine for a TPU's


def test_an_axis_may_run_along_a_part_of_an_axis_of_the_machine() -> None:
    mesh = ts.make_mesh(topology="v6e:16x32", batch=64, model=8)
    assert dict(mesh.shape) == {"batch": 64, "model": 8}


@pytest.mark.parametrize(
    "name", ["v9:2x2", "v5e", "v5e:3x3", "v5e:2by2", "h100", "h100:0", "h100:x", "", 4, None.__class__]
)
def test_unknown_topologies_are_refused_with_the_list(name: object) -> None:
    with pytest.raises(ValueError, match=r"make_mesh: there is no topology .*v5e:4x4.*h100:8: a100, h100"):
        ts.make_mesh(topology=name, batch=4)  # pyright: ignore[reportArgumentType]


def test_devices_and_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="give devices or a topology, not both"):
        ts.make_mesh(jax.devices(), topology="v5e:2x2", batch=4)
    with pytest.raises(ValueError, match=r"needs 8 devices, but 'v5e:2x2' has 4\."):
        ts.make_mesh(topology="v5e:2x2", batch=8)
    assert dict(ts.make_mesh(topology="v5e:2x2", batch=-1).shape) == {"batch": 4}


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("v5e:2x2", "libtpu", "tpu"), ("a100:8", "jax_cuda12_plugin", "cuda")]
)
def test_a_compiler_that_is_missing_is_named(
    name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"topology='{name}' needs {module}.*pip install 'torch_shard\[{extra}\]'"
    ):
        ts.make_mesh(topology=name, batch=4)


def test_nothing_is_put_there() -> None:
    mesh, plan = ts.make_mesh(topology="v5e:2x2", batch=4), ts.ShardingPlan({}, default=P())
    model = torch.nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"place: the devices of mesh \(batch=4\) are those of make_mesh\(topology=\.\.\.\)"
    ):
        ts.place(model, mesh, plan)
    assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100:4", "h100:8"])
def test_steps_compile_for_gpus_that_are_not_there(name: str) -> None:
    pytest.importorskip("jax_cuda12_plugin", reason="pip install 'torch_shard[cuda]' (5.5 GB)")
    mesh = ts.make_mesh(topology=name, batch=-1, model=2)
    plan = ts.ShardingPlan({"weight": P("model")}, default=P())
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    step = ts.make_train_step(torch.nn.Linear(64, 32), loss_fn, optax.adam(1e-3), mesh=mesh, plan=plan)
    preview = step.preview(torch.empty(16, 64, device="meta"))
    assert preview.fits()
    assert preview.limit == GPUS[name.split(":")[0]].memory
    assert preview.collectives["all-reduce"] > 0
