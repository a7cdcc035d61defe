"""Each parameter's shard is what tensor parallelism of transformers itself gives the process of that device."""

import pathlib

import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

import torch_shard as ts
from tests.oracles.hf_parallel import LOGITS, local_shards
from tests.tables.cases import make_mesh
from tests.tables.hf_models import HEADED, HF_MODELS, HFModel, causal

NUM = 2
QWEN3_MOE = causal("Qwen3Moe", {**HEADED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, {})
FAMILIES = {model.name: model for model in [*HF_MODELS, QWEN3_MOE]}
NAMES = ("Llama", "Phi3", "DeepseekV3", "Qwen3Moe", "Qwen3Moe-ep")


def test_shards_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    """`validation/hf_families` has more families."""
    check_shards({name: FAMILIES[name.removesuffix("-ep")] for name in NAMES}, tmp_path)


def check_shards(families: dict[str, HFModel], tmp_path: pathlib.Path) -> None:
    """Of each family; with its experts distributed, if its name ends in "-ep"."""
    models = {name: save(family, tmp_path / name) for name, family in families.items()}
    local_shards(tmp_path, NUM)
    mesh, faults = make_mesh((8 // NUM, NUM)), list[str]()
    for name, model in models.items():
        options = {"ep": "model"} if name.endswith("-ep") else {}
        plan = ts.plans.from_hf(model, mesh, fsdp=None, **options)
        for rank in range(NUM):
            ours = _shards(model, plan, mesh, rank)
            with np.load(tmp_path / f"{name}.{rank}.npz") as theirs:
                assert set(theirs) == {*ours, LOGITS}, name
                faults += [f"{name}: {key} of {rank}" for key in ours if not np.array_equal(ours[key], theirs[key])]
    assert not faults


def save(family: HFModel, folder: pathlib.Path) -> nn.Module:
    """A model, which is in the folder too."""
    torch.manual_seed(0)
    model = family.build(family.attention[0])
    model.save_pretrained(folder)
    return model


def _shards(model: nn.Module, plan: ts.ShardingPlan, mesh: Mesh, rank: int) -> dict[str, np.ndarray]:
    """What a device holds of each parameter."""
    resolved, shards = plan.resolve(model, mesh), dict[str, np.ndarray]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry, value = resolved.entries[name], parameter.detach().numpy()
        sharding, (shape, local) = resolved.stored(name), (entry.shape, entry.local_shape)
        if entry.form is not None:  # each piece is split by itself
            shape = entry.form.stored_shape(shape)
        shards[name] = value.reshape(shape)[sharding.devices_indices_map(shape)[mesh.devices[0, rank]]].reshape(local)
    return shards
