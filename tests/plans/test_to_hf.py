"""Plans written as a `tp_plan` of transformers, and read again."""

import json
import pathlib
import re

import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from torch import nn
from transformers import LlamaForCausalLM

import torch_shard as ts
from tests.oracles.hf_parallel import LOGITS, local_shards, logits_of
from tests.plans.test_from_hf import COLUMN, ROW, tiny
from tests.plans.test_hf_parallel import FAMILIES, save
from tests.tables.cases import make_mesh
from torch_shard._sharding import make_matcher

MESH = make_mesh((4, 2))
MODELS = {name: tiny(name, **fields) for name, fields in {"Llama": {"attention_bias": True}, "Mixtral": {}}.items()}


def over_model(plan: ts.ShardingPlan, model: nn.Module) -> dict[str, int | None]:
    """Which dim of each entry is split over `model`."""
    specs = {name: sharding.spec for name, sharding in plan.resolve(model, MESH).items()}
    return {name: spec.index("model") if "model" in spec else None for name, spec in specs.items()}


def assert_comes_back(plan: ts.ShardingPlan, model: nn.Module) -> list[str]:
    """What `from_hf` reads is the plan, but for what is listed; gives the list."""
    written, unsaid = ts.plans.to_hf(plan, model, MESH)
    wanted, before = over_model(plan, model), model.tp_plan
    model.tp_plan = written
    try:
        found = over_model(ts.plans.from_hf(model, MESH, fsdp=None), model)
    finally:
        model.tp_plan = before
    listed = [make_matcher(line.split()[0]) for line in unsaid]
    assert [n for n in wanted if wanted[n] != found[n]] == [n for n in wanted if any(matches(n) for matches in listed)]
    return unsaid


@st.composite
def plans(draw: st.DrawFn) -> tuple[nn.Module, ts.ShardingPlan]:
    """A model, and a plan that splits any dims of its layers' entries."""
    model = draw(st.sampled_from(list(MODELS.values())))
    keys = {re.sub(r"\.\d+\.", ".*.", name): parameter.ndim for name, parameter in model.named_parameters()}
    own = draw(st.booleans())
    rules = dict(ts.plans.from_hf(model, MESH, fsdp=None).rules) if own else {}
    edited = draw(st.sets(st.sampled_from(sorted(keys)), max_size=4 if own else 16))
    for key in sorted(edited):
        dim = draw(st.sampled_from([None, *range(keys[key])]))
        rules[key] = P() if dim is None else P(*(None for _ in range(dim)), "model")
    return model, ts.ShardingPlan(rules, default=P())


@settings(max_examples=20, deadline=None)
@given(plans())
def test_what_is_written_reads_as_the_plan_but_for_what_is_listed(asked: tuple[nn.Module, ts.ShardingPlan]) -> None:
    model, plan = asked
    assert_comes_back(plan, model)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_plan_is_written_as_it_is(name: str) -> None:
    model = MODELS[name]
    assert ts.plans.to_hf(ts.plans.from_hf(model, MESH), model, MESH) == (model.tp_plan, [])


def test_layers_of_which_the_model_says_something_else_take_and_return_whole_activations() -> None:
    model = MODELS["Llama"]
    plan = ts.plans.from_hf(model, MESH, fsdp=None) | {
        "**.k_proj.*": P(),
        "**.v_proj.weight": ROW,
        "**.v_proj.bias": P(),
    }
    written, unsaid = ts.plans.to_hf(plan, model, MESH)
    attention = {key: style for key, style in written.items() if "self_attn" in key}
    assert attention == {
        "model.layers.*.self_attn.q_proj": "colwise_gather_output",
        "model.layers.*.self_attn.k_proj": "replicate",
        "model.layers.*.self_attn.v_proj": "rowwise_split_input",
        "model.layers.*.self_attn.o_proj": "rowwise_split_input",
    }
    assert not unsaid
    assert written["model.layers.*.mlp.down_proj"] == "rowwise"


@pytest.mark.slow
def test_transformers_runs_what_is_written(tmp_path: pathlib.Path) -> None:
    """In two processes, where layers that take whole activations stand beside others."""
    for number, edits in enumerate(EDITS):
        model = save(FAMILIES["Llama"], tmp_path / str(number))
        plan = ts.plans.from_hf(model, MESH, fsdp=None) | edits
        written, unsaid = ts.plans.to_hf(plan, model, MESH)
        assert not unsaid
        (tmp_path / f"{number}.json").write_text(json.dumps(written))
    local_shards(tmp_path, 2)
    for number in range(len(EDITS)):
        model = LlamaForCausalLM.from_pretrained(tmp_path / str(number))
        with np.load(tmp_path / f"{number}.1.npz") as found:
            np.testing.assert_allclose(found[LOGITS], logits_of(model), rtol=1e-4, atol=1e-5)  # sums in two parts


EDITS: list[dict[str, P]] = [
    {"**.k_proj.weight": P(), "**.v_proj.weight": ROW},
    {"**.up_proj.weight": ROW, "**.down_proj.weight": COLUMN, "**.embed_tokens.weight": ROW, "lm_head.weight": ROW},
    {"**.self_attn.*.weight": P(), "lm_head.weight": P()},
]


def test_adapters() -> None:
    with torch.device("meta"):
        model = peft.tuners.lora.LoraModel(
            tiny("Llama"), peft.LoraConfig(target_modules=["q_proj", "o_proj"]), adapter_name="default"
        )
    plan = ts.plans.from_hf(model, MESH)
    assert ts.plans.to_hf(plan, model, MESH) == (model.model.tp_plan, [])
    _, unsaid = ts.plans.to_hf(plan | {"**.lora_A.default.weight": COLUMN}, model, MESH)
    assert [line.split()[0] for line in unsaid] == [
        "model.model.layers.*.self_attn.q_proj.lora_A.default.weight",
        "model.model.layers.*.self_attn.o_proj.lora_A.default.weight",
    ]


def test_what_cannot_be_said_is_listed(caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["Mixtral"]
    plan = ts.plans.from_hf(model, MESH, fsdp=None, ep="model") | ts.ShardingPlan(
        {"model.layers.0.self_attn.q_proj.weight": P(), "model.norm.weight": P("batch"), "**.inv_freq": P("model")},
        activations={"model.layers.*": P("batch", "model")},
    )
    _, unsaid = ts.plans.to_hf(plan, model, MESH, fsdp=None)
    assert unsaid == [
        "  model.layers.*.mlp.experts.gate_up_proj (4, 128, 32): P('model'); its rules give P()",
        "  model.layers.*.mlp.experts.down_proj (4, 32, 64): P('model'); its rules give P()",
        "  model.layers.1.self_attn.q_proj.weight (32, 32): P('model'); its rules give P()",  # where layer 0 is whole
        "  model.norm.weight (32,): P('batch'); its rules give P()",
        "  model.rotary_emb.inv_freq (4,): P('model'); its rules give P()",
        "  model.layers.*: an activation, P('batch', 'model')",
    ]
    assert all(line in caplog.text for line in unsaid)


def test_several_models_are_refused() -> None:
    pair = nn.ModuleDict({"a": MODELS["Llama"], "b": MODELS["Mixtral"]})
    with pytest.raises(ValueError, match=r'plans.to_hf: the model holds several with a tp_plan: "a", "b".'):
        ts.plans.to_hf(ts.plans.replicated(), pair, MESH)
