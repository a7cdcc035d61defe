"""The plans that models of transformers have for themselves, as specs."""

import dataclasses
import logging
from typing import Any

import peft
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import Case, make_mesh
from tests.tables.hf_models import HF_MODELS

COLUMN, ROW = P("model"), P(None, "model")
NAMED = {model.name: model for model in HF_MODELS}


def tiny(name: str, **fields: Any) -> nn.Module:
    """A model of the table, on the meta device."""
    found = dataclasses.replace(NAMED[name], fields={**NAMED[name].fields, **fields})
    with torch.device("meta"):
        return found.build(found.attention[0])


def split(model: nn.Module, sizes: tuple[int, int] = (4, 2), **options: Any) -> dict[str, P]:
    """Rules of the imported plan that split something; the model takes it on the mesh."""
    mesh = make_mesh(sizes)
    plan = ts.plans.from_hf(model, mesh, **options)
    plan.resolve(model, mesh)
    return {key: spec for key, spec in plan.rules.items() if any(spec)}


def test_dense_layers():
    assert split(tiny("Llama"), fsdp=None) == {
        "model.embed_tokens.weight": COLUMN,
        **{f"model.layers.*.self_attn.{name}_proj.weight": COLUMN for name in "qkv"},
        "model.layers.*.self_attn.o_proj.weight": ROW,
        "model.layers.*.mlp.gate_proj.weight": COLUMN,
        "model.layers.*.mlp.up_proj.weight": COLUMN,
        "model.layers.*.mlp.down_proj.weight": ROW,
        "lm_head.weight": COLUMN,
    }


def test_biases_follow_columns_and_not_rows():
    found = split(tiny("Qwen2"), fsdp=None)
    assert found["model.layers.*.self_attn.q_proj.bias"] == COLUMN
    found = split(tiny("Llama", attention_bias=True), fsdp=None)
    assert found["model.layers.*.self_attn.k_proj.bias"] == COLUMN
    assert "model.layers.*.self_attn.o_proj.bias" not in found


def test_storage_is_split_along_the_first_dim_that_divides():
    found = split(tiny("Llama"))
    assert found["model.layers.*.self_attn.q_proj.weight"] == P("model", "batch")
    assert found["model.layers.*.self_attn.o_proj.weight"] == P("batch", "model")
    assert "model.layers.*.input_layernorm.weight" not in found
    assert split(tiny("Llama"), tp=None)["lm_head.weight"] == P("batch", None)
    assert split(tiny("Llama"), tp=None, fsdp=("batch", "model"))["lm_head.weight"] == P(("batch", "model"), None)


@pytest.mark.parametrize(
    ("ep", "up", "down"),
    [
        (None, P("batch", "model", None), P("batch", None, "model")),
        ("model", P("model", "batch", None), P("model", "batch", None)),  # as HF has it: no rule of tp_plan counts
        ("batch", P("batch", "model"), P("batch", None, "model")),
        (("batch", "model"), P(("batch", "model")), P(("batch", "model"))),
    ],
)
def test_experts(ep: Any, up: P, down: P):
    found = split(tiny("Qwen2Moe", num_experts=8), ep=ep)
    assert found["model.layers.*.mlp.experts.gate_up_proj"] == up
    assert found["model.layers.*.mlp.experts.down_proj"] == down
    assert found["model.layers.*.self_attn.q_proj.weight"] == P("model", "batch")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's
def test_adapters_follow_the_layer_that_they_adapt():
    targets = ["q_proj", "o_proj", "embed_tokens", "k_proj"]
    config = peft.LoraConfig(target_modules=targets, modules_to_save=["lm_head"])
    model = peft.get_peft_model(tiny("Llama", num_key_value_heads=1), config)
    found = split(model, fsdp=None)
    attention = "base_model.model.model.layers.*.self_attn"
    assert {key: spec for key, spec in found.items() if "mlp" not in key} == {
        "base_model.model.model.embed_tokens.base_layer.weight": COLUMN,
        "base_model.model.model.embed_tokens.lora_embedding_A.default": ROW,
        f"{attention}.q_proj.base_layer.weight": COLUMN,
        f"{attention}.q_proj.lora_B.default.weight": COLUMN,
        f"{attention}.o_proj.base_layer.weight": ROW,
        f"{attention}.o_proj.lora_A.default.weight": ROW,
        "base_model.model.lm_head.original_module.weight": COLUMN,
        "base_model.model.lm_head.modules_to_save.default.weight": COLUMN,
    }
    config = peft.LoraConfig(target_modules=targets[:2], lora_bias=True)
    found = split(peft.get_peft_model(tiny("Llama", attention_bias=True), config), fsdp=None)
    assert found[f"{attention}.q_proj.lora_B.default.bias"] == COLUMN
    assert f"{attention}.o_proj.lora_B.default.bias" not in found


def test_a_tie_is_split_as_that_of_its_names_which_has_a_rule():
    model = tiny("Llama", tie_word_embeddings=True)
    model.tie_weights()
    del model.tp_plan["model.embed_tokens"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert split(model, fsdp=None)["model.embed_tokens.weight"] == COLUMN
    model.tp_plan |= {"lm_head": "rowwise_split_input", "model.embed_tokens": "embedding_rowwise"}
    plan = ts.plans.from_hf(model, make_mesh((4, 2)), fsdp=None)
    assert plan.rules["lm_head.weight"] == COLUMN
    assert plan.reasons["lm_head.weight"] == "embedding_rowwise, as model.embed_tokens.weight"


def test_wrappers_and_several_models_in_one():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = tiny("Llama"), torch.compile(tiny("Qwen2"), backend="eager")
            self.head = nn.Linear(4, 4, bias=False, device="meta")

    found = split(Pair(), fsdp=None)
    assert found["student.model.layers.*.self_attn.o_proj.weight"] == ROW
    assert found["teacher._orig_mod.model.layers.*.self_attn.q_proj.bias"] == COLUMN
    assert "head.weight" not in found


class Layers(nn.Module):
    """What the styles below split, with a plan of its own."""

    def __init__(self, plan: dict[str, str], sizes: int = 8):
        super().__init__()
        self.tp_plan, self.layers = plan, nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.linear, layer.embedding = nn.Linear(sizes, sizes), nn.Embedding(sizes, sizes)
            layer.experts, layer.sinks = nn.Module(), nn.Parameter(torch.ones(sizes))
            layer.experts.weight = nn.Parameter(torch.ones(4, sizes, sizes))
            self.layers.append(layer)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer.linear(hidden)
        return hidden


NOTHING = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_identity_expert")
MARKERS = ("moe_tp_experts", "ep_dispatch_experts", "local_params")
LINEAR, EXPERTS = "linear", "experts.weight"


@pytest.mark.parametrize(
    ("style", "of", "wanted"),
    [
        *((style, LINEAR, {"linear.weight": COLUMN, "linear.bias": COLUMN}) for style in ("colwise", "colwise_rep")),
        ("colwise_gather_output", LINEAR, {"linear.weight": COLUMN, "linear.bias": COLUMN}),
        ("colwise", "sinks", {"sinks": COLUMN}),
        ("colwise", EXPERTS, {EXPERTS: P(None, "model")}),
        *((style, LINEAR, {"linear.weight": ROW}) for style in ("rowwise", "rowwise_rep", "rowwise_split_input")),
        ("rowwise", "sinks", {"sinks": COLUMN}),
        ("rowwise", EXPERTS, {EXPERTS: P(None, None, "model")}),
        ("packed_colwise", EXPERTS, {EXPERTS: P(None, "model")}),
        ("packed_rowwise", EXPERTS, {EXPERTS: P(None, None, "model")}),
        ("packed_rowwise", LINEAR, {"linear.weight": ROW}),
        ("embedding_rowwise", "embedding", {"embedding.weight": COLUMN}),
        ("embedding_colwise", "embedding", {"embedding.weight": ROW}),
        ("grouped_gemm", EXPERTS, {EXPERTS: COLUMN}),
        *((style, LINEAR, {}) for style in (*NOTHING, *MARKERS, "sequence_parallel")),
    ],
)
def test_styles(style: str, of: str, wanted: dict[str, P]):
    model = Layers({f"layers.*.{of}": style, "layers.*.not_there": "colwise"})
    assert split(model, fsdp=None) == {f"layers.*.{name}": spec for name, spec in wanted.items()}
    plan = ts.plans.from_hf(model, make_mesh((4, 2)), fsdp=None)
    name = next(iter(wanted), "linear.weight")
    assert plan.reasons[f"layers.*.{name}"].startswith(style)
    assert ("nothing to do" in plan.reasons[f"layers.*.{name}"]) == (style in NOTHING and style != "replicate")


def test_a_dim_is_split_once():
    model = Layers({"layers.*.experts.weight": "grouped_gemm"})
    model.ep_plan = model.tp_plan
    plan = ts.plans.from_hf(model, make_mesh((4, 2)), ep="batch", fsdp=None)
    assert plan.rules["layers.*.experts.weight"] == P("batch")
    assert plan.reasons["layers.*.experts.weight"] == "grouped_gemm; grouped_gemm (the dim is split already)"


def test_every_registered_style_is_known():
    from transformers.distributed import expert_parallel, fsdp, tensor_parallel  # noqa: F401 they register
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    from torch_shard._plans.from_hf import FSDP_STYLES, STYLES

    assert set(STYLES) == set(ALL_PARALLEL_STYLES.keys())
    assert set(FSDP_STYLES) == set(fsdp.ALL_FSDP_STYLES)


def test_names_are_looked_up_as_transformers_does():
    from transformers.distributed.parallel_utils import _get_parameter_plan

    from torch_shard._plans.from_hf import Rules

    plan = {"layers.*.linear": "a", "layers.*.linear.bias": "b", "w1": "c", "blocks.*.0.up": "d", "deep.*": "e"}
    model = nn.Module()
    model.tp_plan = plan
    rules = Rules(model, "tp_plan")
    names = ["layers.0.linear.weight", "layers.11.linear.bias", "w1", "w1.weight", "w2.weight", "blocks.3.0.up.weight"]
    for name in [*names, "deep.3", "deep.3.weight", "deep.3.4.weight", "0.linear.weight", "layers.linear.weight"]:
        found = rules.of_parameter(name)
        assert (found and found.style) == _get_parameter_plan(name, plan), name
        found = rules.of_module(name)
        assert (found and found.style) == _get_parameter_plan(name, plan, is_weight=False), name


def test_sequence_parallel_modules_take_and_return_what_is_split_along_the_sequence():
    plan = ts.plans.from_hf(Layers({"layers.*.linear": "sequence_parallel"}), make_mesh((4, 2)))
    over_time = P(P.UNCONSTRAINED, "model")
    assert plan.activations == {"layers.*.linear": over_time, "layers.*.linear:input": over_time}


def test_what_does_not_divide_is_listed_and_with_strict_refused(caplog: pytest.LogCaptureFixture):
    model = tiny("Llama", vocab_size=63, num_key_value_heads=1)
    with caplog.at_level(logging.WARNING):
        found = split(model, fsdp=None)
    assert "lm_head.weight" not in found
    heads = "1 heads are not a multiple of model=2, and would be cut"
    lines = [
        "model.embed_tokens.weight (63, 32), 8.1 kB, whole: embedding_rowwise: dim 0 = 63 is not a multiple of model=2",
        f"model.layers.0.self_attn.k_proj.weight (8, 32), 1.0 kB, whole: colwise: {heads}",
        f"model.layers.1.self_attn.v_proj.weight (8, 32), 1.0 kB, whole: colwise: {heads}",
    ]
    assert caplog.messages[0].startswith("plans.from_hf: 6 entries do not divide over the mesh.")
    assert all(line in caplog.text for line in lines)
    with pytest.raises(
        ValueError, match=r"plans.from_hf: 6 entries do not divide over the mesh.* strict=False"
    ) as error:
        split(model, fsdp=None, strict=True)
    assert all(line in str(error.value) for line in lines)
    plan = ts.plans.from_hf(model, make_mesh((4, 2)), fsdp=None)
    assert plan.reasons["model.layers.*.self_attn.k_proj.weight"] == f"colwise; {heads}; whole, 1.0 kB on each device"


def test_all_that_cannot_be_read_is_said_together():
    model = Layers({"layers.*.linear": "gather", "layers.*.experts": "ep_router"})
    with pytest.raises(ValueError, match=r"plans.from_hf: Layers has no plan that can be read") as error:
        ts.plans.from_hf(model, make_mesh((4, 2)), ep="model")
    text = str(error.value)
    assert 'tp_plan["layers.*.linear"] is "gather", which is none of its styles: colwise,' in text
    assert 'tp_plan["layers.*.experts"] is "ep_router"' in text
    assert "Change it in model.tp_plan, or pass tp=None." in text
    assert "it has no ep_plan. Use ts.plans.expert(model, mesh)" in text
    with pytest.raises(ValueError, match=r'tp="modle" names no axis of it.*fsdp="data" names no axis'):
        ts.plans.from_hf(model, make_mesh((4, 2)), tp="modle", fsdp="data")


def test_heads_are_counted_by_what_attention_says():
    found = split(tiny("DeepseekV3", num_attention_heads=6, num_key_value_heads=6), sizes=(2, 4), fsdp=None)
    assert not any("_b_proj" in key for key in found)  # named in no rule of its own
    model = tiny("DeepseekV3", num_attention_heads=6, num_key_value_heads=6)
    model.tp_plan |= {f"model.layers.*.self_attn.{name}": "colwise" for name in ("q_b_proj", "kv_b_proj")}
    plan = ts.plans.from_hf(model, make_mesh((2, 4)), fsdp=None)
    assert "6 heads are not a multiple of model=4" in plan.reasons["model.layers.*.self_attn.kv_b_proj.weight"]
    assert "6 heads are not a multiple of model=4" in plan.reasons["model.layers.*.self_attn.q_b_proj.weight"]


@dataclasses.dataclass(frozen=True)
class Imported(Case):
    """A case whose plan is its model's own."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def plan(self) -> ts.ShardingPlan:
        return ts.plans.from_hf(self.model(), make_mesh((4, 2)), **self.options)


def test_storage_says_what_fsdp_plan_asks():
    plan = ts.plans.from_hf(tiny("Llama"), make_mesh((4, 2)))
    stored = "fully sharded over batch"
    assert plan.reasons["model.layers.*.mlp.up_proj.weight"] == f"colwise; {stored}; free_full_weight"
    assert f"{stored}; keep_full_weight, stored alike" in plan.reasons["lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("Phi3", {}), ("Mixtral", {}), pytest.param("Mixtral", {"ep": "batch"}, marks=pytest.mark.slow)],
)
def test_training_equals_eager_torch(name: str, options: dict[str, Any]):
    model = dataclasses.replace(NAMED[name], fields={**NAMED[name].fields, "num_hidden_layers": 1})
    found = model.cases()[0]
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(Case)}
    case = Imported(**fields | {"rules": {}, "options": options})
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))
