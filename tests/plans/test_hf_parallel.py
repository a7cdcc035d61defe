"""Each parameter's shard is what tensor parallelism of transformers itself gives the process of that device."""

import pathlib

import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from torch import nn

import torch_shard as ts
from tests.oracles.hf_parallel import LOGITS, local_shards
from tests.tables.cases import make_mesh
from tests.tables.hf_models import GROUPED, HEADED, HF_MODELS, HFModel, causal

NUM = 2
MORE = [
    causal("Qwen3Moe", {**HEADED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, {}),
    causal("Olmo2", GROUPED, {}),
    causal("Granite", GROUPED, {}),
    causal("Glm4", HEADED, {}),
    causal("Cohere2", GROUPED, {}),
    causal("GPTNeoX", {**GROUPED, "attention_bias": True}, {}),
    causal("MiMoV2Flash", {**HEADED, "n_routed_experts": 4, "num_experts_per_tok": 2}, {}, attention=("eager",)),
    HFModel(
        "AriaText",
        "AriaTextForCausalLM",
        "AriaTextConfig",
        {**GROUPED, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        HF_MODELS[0].batch,
        {},
    ),
]
FAMILIES = {model.name: model for model in [*HF_MODELS, *MORE]}
MOST = [
    "Qwen2",
    "Qwen3",
    "Qwen2Moe",
    "Mixtral",
    "Gemma2",
    "Gemma3",
    "DeepseekV3",
    "Phi3",
    *(model.name for model in MORE),
]
CHECKED = {"Llama", *MOST}
EXPERTS = ["Mixtral-ep", "Qwen3Moe-ep", "GptOss-ep"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["Llama", "Qwen3Moe", "Qwen3Moe-ep"], id="dense and experts"),
        pytest.param([*MOST, *EXPERTS], marks=pytest.mark.slow, id="most"),
    ],
)
def test_shards_are_those_of_transformers(names: list[str], tmp_path: pathlib.Path) -> None:
    models = {name: save(FAMILIES[name.removesuffix("-ep")], tmp_path / name) for name in names}
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
