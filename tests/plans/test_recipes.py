"""Recipes against plans typed by hand, JAX's own shard shapes, and eager torch."""

import logging
import math
import re

import peft
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from tests.oracles.steps import step_of
from tests.plans.test_from_hf import tiny
from tests.tables.cases import make_mesh
from tests.tables.hf_models import HF_MODELS, HFModel
from torch_shard._plans import quietly


def on_meta(case: HFModel) -> nn.Module:
    with torch.device("meta"):
        return case.build(case.attention[0])


def trimmed(spec: P) -> tuple[object, ...]:
    parts = tuple(spec)
    while parts and parts[-1] is None:
        parts = parts[:-1]
    return parts


@pytest.fixture(scope="module", autouse=True)
def quiet():
    logging.getLogger("torch_shard").setLevel(logging.ERROR)
    yield
    logging.getLogger("torch_shard").setLevel(logging.NOTSET)


@pytest.mark.parametrize("case", HF_MODELS, ids=lambda case: case.name)
def test_tensor_parallelism_is_what_is_typed_by_hand(case: HFModel) -> None:
    """All that the table of models splits by hand: of biases and embeddings it keeps some whole."""
    model, mesh = on_meta(case), make_mesh((4, 2))
    has_experts = any(name.endswith(".experts.down_proj") for name, _ in model.named_parameters())
    plan = ts.plans.expert(model, mesh, fsdp=None, tp="model") if has_experts else ts.plans.tp(model, mesh)
    found, wanted = plan.resolve(model, mesh), ts.ShardingPlan(case.rules, default=P()).resolve(model, mesh)
    asked = [name for name, entry in wanted.entries.items() if entry.rule != "default" and not name.endswith("sinks")]
    assert {n: trimmed(found[n].spec) for n in asked} == {n: trimmed(wanted[n].spec) for n in asked}
    assert all(entry.reason for entry in found.entries.values())


@pytest.mark.parametrize("case", HF_MODELS, ids=lambda case: case.name)
def test_a_device_holds_its_share_of_every_matrix(case: HFModel) -> None:
    """But for what a plan lists."""
    model, mesh = on_meta(case), make_mesh((4, 2))
    for plan, shares in (
        (ts.plans.fsdp(model, mesh, fsdp=("batch", "model")), 8),
        (ts.plans.hsdp(model, mesh, replicate="model"), 4),
        (ts.plans.fsdp_tp(model, mesh), 4),
    ):
        entries = plan.resolve(model, mesh).entries
        listed = {name for name, entry in entries.items() if "not a multiple of" in entry.reason}
        held = {name: math.prod(entries[name].local_shape) for name, p in model.named_parameters() if p.ndim > 1}
        assert [n for n in held if n not in listed and held[n] * shares > model.get_parameter(n).numel()] == []


class Fused(nn.Module):
    """What is called as usual, of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.kv_proj, self.gate_up_proj = nn.Linear(8, 24), nn.Linear(8, 16, bias=False), nn.Linear(8, 12)
        self.query_key_value = nn.Linear(8, 24)  # each head has all three
        self.in_proj = nn.Linear(8, 20)  # of several sizes
        self.to_qkv = nn.Linear(8, 24, bias=False)
        self.tied = nn.Linear(8, 24, bias=False)
        self.tied.weight = self.to_qkv.weight


def test_fused_projections_are_stored_in_pieces() -> None:
    mesh = make_mesh((4, 2))
    found = {"qkv.weight": 3, "qkv.bias": 3, "kv_proj.weight": 2, "gate_up_proj.weight": 2, "gate_up_proj.bias": 2}
    wanted = {name: ts.Pieces(num, dim=0) for name, num in found.items()}
    model = Fused()
    assert ts.plans.tp(model, mesh).stored == wanted
    assert ts.plans.fsdp(model, mesh).stored == {}
    plan = ts.plans.fsdp_tp(model, mesh)
    assert plan.stored == wanted
    assert plan.rules["qkv.weight"] == P("model", "batch")
    assert ts.plans.tp(model, make_mesh((2, 4))).stored == {n: wanted[n] for n in wanted if "gate" not in n}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's
def test_adapters_of_a_fused_projection_are_stored_in_pieces_too() -> None:
    torch.manual_seed(0)
    options = dict.fromkeys(("bos_token_id", "eos_token_id", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16, n_positions=8, **options)
    adapted = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, init_lora_weights=False)
    model, mesh = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapted), make_mesh((4, 2))
    plan = ts.plans.tp(model, mesh)
    stored = plan.stored
    layer = "base_model.model.transformer.h.0.attn.c_attn"
    assert stored[f"{layer}.base_layer.weight"] == ts.Pieces(3, dim=1)
    assert stored[f"{layer}.lora_B.default.weight"] == ts.Pieces(3, dim=0)
    assert not any("lora_A" in name for name in stored)
    step = step_of(model, language_loss, plan=plan)
    step.prove(step.init(seed=0), torch.arange(32).view(8, 4) % 16).raise_if_different()


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, labels=tokens).loss


class Experts(nn.Module):
    """Four, from 8 features to 6 and back, with matrices (out, in) or (in, out)."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        into, out = ((8, 12), (6, 8)) if transposed else ((12, 8), (8, 6))
        self.gate_up_proj = nn.Parameter(torch.zeros(4, *into))
        self.down_proj = nn.Parameter(torch.zeros(4, *out))


@pytest.mark.parametrize(("transposed", "into", "out"), [(False, 1, 2), (True, 2, 1)])
def test_inner_features_of_experts_are_split_however_they_lie(transposed: bool, into: int, out: int) -> None:
    rules = ts.plans.tp(Experts(transposed), make_mesh((4, 2))).rules
    assert [tuple(rules[name]).index("model") for name in ("gate_up_proj", "down_proj")] == [into, out]


class Attention(nn.Module):
    """Two key-value heads, four of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o_proj = nn.Linear(16, 16)


def test_heads_are_not_cut_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    mesh = make_mesh((2, 4))
    with caplog.at_level(logging.WARNING, "torch_shard"):
        plan = ts.plans.tp(Attention(), mesh)
    assert plan.rules["q_proj.weight"] == P("model", None)
    assert plan.rules["k_proj.weight"] == P()
    assert plan.reasons["k_proj.weight"] == (
        "column layer; 2 heads are not a multiple of model=4, and would be cut; whole, 512 bytes on each device"
    )
    assert "k_proj.weight (8, 16), 512 bytes, whole: column layer: 2 heads are not a multiple of model=4" in caplog.text


def odd() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 15), nn.Linear(15, 8))


def test_what_does_not_divide_is_listed_with_its_bytes_and_strict_refuses_it(caplog: pytest.LogCaptureFixture) -> None:
    mesh = make_mesh((4, 2))
    with caplog.at_level(logging.WARNING, "torch_shard"):
        plan = ts.plans.fsdp_tp(odd(), mesh, pad_vocab=False)
    said = caplog.text
    assert "0.weight (7, 8), 224 bytes, P(None, 'batch'): " in said
    assert "dim 0 = 7 is not a multiple of model=2" in said
    assert "1.weight (15, 8), 480 bytes, P(None, 'batch'): " in said
    assert plan.resolve(odd(), mesh)["0.weight"].spec == P(None, "batch")
    message = (
        "plans.fsdp_tp: 4 entries do not divide over the mesh. Choose sizes or a mesh that divide, or strict=False"
    )
    with pytest.raises(ValueError, match=f"(?s)^{re.escape(message)}.*0.weight.*1.weight.*1.bias.*2.weight"):
        ts.plans.fsdp_tp(odd(), mesh, strict=True, pad_vocab=False)


@pytest.mark.parametrize(
    ("num_words", "size", "padded"),
    [(7, 2, 8), (13, 8, 16), (8, 2, None), (5, 4, None), (3, 2, None)],
    ids=["3 spared, 1 added", "11 spared, 3 added", "divides", "3 spared, 3 added", "1 spared, 1 added"],
)
def test_a_vocabulary_is_padded_where_more_rows_are_spared_than_added(
    num_words: int, size: int, padded: int | None
) -> None:
    model, mesh = nn.Sequential(nn.Embedding(num_words, 8), nn.Linear(8, num_words)), make_mesh((8 // size, size))
    even = None if num_words % size == 0 else ts.Padded(math.ceil(num_words / size) * size, dim=0)
    wanted = {"auto": None if padded is None else ts.Padded(padded, dim=0), True: even, False: None}
    for recipe in (ts.plans.tp, ts.plans.fsdp_tp):
        found = {asked: recipe(model, mesh, pad_vocab=asked).resolve(model, mesh) for asked in wanted}
        assert {asked: plan.entries["0.weight"].form for asked, plan in found.items()} == wanted
        assert recipe(model, mesh) == recipe(model, mesh, pad_vocab="auto")


def test_a_layer_of_experts_may_hold_a_scalar() -> None:
    experts = Experts(transposed=False)
    experts.scale = nn.Parameter(torch.ones(()))
    plan = ts.plans.expert(experts, ts.make_mesh(batch=2, model=2), tp="model")
    assert plan.rules["gate_up_proj"][0] == "model"
    assert plan.rules["scale"] == P()


def test_experts_and_what_is_fully_sharded_may_share_an_axis() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.experts = Experts(transposed=False)
    plan = ts.plans.expert(model, ts.make_mesh(batch=2, model=2), ep="batch")
    assert plan.rules["0.weight"] == P("batch", None)
    assert plan.rules["experts.gate_up_proj"] == plan.rules["experts.down_proj"] == P("batch")


def test_a_model_with_experts_is_told_of_their_recipe(caplog: pytest.LogCaptureFixture) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(4, 8, 8))

    mesh, said = make_mesh((4, 2)), r"plans.fsdp_tp: 0 and 1 more hold experts, .* plans.expert\(model, mesh, tp="
    with caplog.at_level(logging.WARNING, "torch_shard"):
        ts.plans.fsdp_tp(nn.Sequential(Experts(), Experts(), nn.Linear(8, 8)), mesh)
        assert len(caplog.records) == 1
        assert re.search(said, caplog.text)
        caplog.clear()
        with quietly():  # as many plans are made where they are compared
            ts.plans.fsdp_tp(nn.Sequential(Experts()), mesh)
        assert not caplog.text
        ts.plans.fsdp_tp(nn.Linear(8, 8), mesh)
    assert not caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ts.plans.fsdp_tp(m, make_mesh((4, 2)), tp="batch"), r'axis "batch" is given twice'),
        (lambda m: ts.plans.fsdp_tp(m, make_mesh((4, 2)), sequence=True), r"Sequential has no ModuleList of layers"),
    ],
)
def test_what_a_recipe_cannot_do_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(nn.Sequential(nn.Linear(8, 8)))


def vision_transformer(labels: int) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 8, "patch_size": 2}
    without = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.ViTConfig(**{"num_hidden_layers": 1, "num_labels": labels}, **sizes, **without)
    return transformers.ViTForImageClassification(config)


def test_convolutions_of_the_input_and_heads_that_narrow_stay_whole() -> None:
    """By channels, or by what they sum over, they would split the stream of a transformer by features."""
    mesh = make_mesh((4, 2))
    vit = ts.plans.tp(vision_transformer(4), mesh).rules
    assert vit["vit.embeddings.patch_embeddings.projection.weight"] == P()
    assert vit["classifier.weight"] == P()
    assert ts.plans.tp(vision_transformer(64), mesh).rules["classifier.weight"] == P("model", None)
    encoder = nn.ModuleDict({"conv1": nn.Conv1d(6, 8, 3), "conv2": nn.Conv1d(8, 8, 3), "conv3": nn.Conv1d(8, 16, 3)})
    specs = ts.plans.tp(encoder, mesh).resolve(encoder, mesh)
    assert [specs[f"conv{n}.weight"].spec for n in (1, 2, 3)] == [P(), P(), P("model", None, None)]
    funnel = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    assert ts.plans.tp(funnel, mesh).resolve(funnel, mesh)["1.weight"].spec == P(None, "model")


def test_a_vision_transformer_gathers_its_matrices_alone() -> None:
    torch.manual_seed(0)
    model, mesh = vision_transformer(4), make_mesh((4, 2))
    batch = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    loss_fn = lambda model, batch: model(batch[0], labels=batch[1]).loss  # noqa: E731
    step = step_of(model, loss_fn, plan=ts.plans.fsdp_tp(model, mesh), scan_layers=False)
    found = count_collectives(step.lower(step.structs, batch).compile())
    assert set(found) == {"all-gather", "all-reduce"}
    assert found["all-gather"] <= 2 * sum(p.ndim > 1 for p in model.parameters())  # for each pass


def test_an_embedding_under_fsdp_keeps_its_rows_of_the_batch() -> None:
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Embedding(1024, 32), nn.Linear(32, 24)), make_mesh((8, 1))
    plan, tokens = ts.plans.fsdp(model, mesh), torch.randint(0, 1024, (8, 16))
    assert plan.rules["0.weight"] == P(None, "batch")
    step = step_of(model, mesh=mesh, plan=plan)
    text = step.lower(step.structs, tokens).compile().as_text() or ""
    assert "f32[16,32]" in text
    assert not re.search(r"f32\[(128|8,16),32\]", text)  # of all rows
    step.prove(step.init(), tokens).raise_if_different()


def test_the_stream_of_a_recipe_is_split_along_its_sequence() -> None:
    model, mesh = tiny("Llama"), make_mesh((4, 2))
    asked = ts.plans.fsdp_tp(model, mesh, sequence=True).activations
    stream, whole, inner = P("batch", "model", None), P("batch", None, None), P("batch", None, "model")
    assert asked["model.embed_tokens"] == stream
    assert {asked[f"model.layers.*.{name}"] for name in ("input_layernorm", "self_attn.o_proj", "mlp.down_proj")} == {
        stream
    }
    assert {asked[f"model.layers.*.{name}"] for name in ("self_attn:hidden_states", "mlp:x")} == {whole}
    assert {asked[f"model.layers.*.{name}"] for name in ("self_attn.q_proj", "mlp.down_proj:input")} == {inner}
    assert asked["lm_head:input"] == whole


def test_torchs_own_attention_is_stored_in_pieces_by_whole_heads() -> None:
    mesh = ts.make_mesh(batch=4, model=2)
    plan = ts.plans.tp(nn.MultiheadAttention(8, 2), mesh)
    assert (plan.rules["in_proj_weight"], plan.rules["out_proj.weight"]) == (P("model", None), P(None, "model"))
    assert plan.stored == {"in_proj_weight": ts.Pieces(3, dim=0), "in_proj_bias": ts.Pieces(3, dim=0)}
    apart = ts.plans.tp(nn.MultiheadAttention(8, 2, kdim=4, vdim=6), mesh)
    assert [apart.rules[f"{name}_proj_weight"] for name in "qkv"] == [P("model", None)] * 3
    assert not any(ts.plans.tp(nn.MultiheadAttention(6, 3), mesh).rules["in_proj_weight"])  # a head would be cut
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    step = step_of(model, plan=ts.plans.fsdp_tp(model, mesh))
    step.lower(step.structs, torch.empty(8, 4, 8, device="meta"))
    assert "pieces" not in step.report()  # which says what each pass moves
    step.prove(step.init(), torch.randn(8, 4, 8)).raise_if_different()


def test_layers_of_images_have_no_sequence() -> None:
    model = transformers.ConvNextModel(transformers.ConvNextConfig(depths=[1, 2], hidden_sizes=[8, 16], num_stages=2))
    with pytest.raises(
        ValueError, match=r"sequence=True, and ConvNextModel has no ModuleList of layers .* \(batch, seq"
    ):
        ts.plans.fsdp_tp(model, make_mesh((4, 2)), sequence=True)


def test_a_layer_that_makes_one_dim_of_rows_and_sequence_is_given_a_split_stream() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 4}
    config = transformers.OPTConfig(
        **sizes, vocab_size=64, num_hidden_layers=1, dropout=0.0, max_position_embeddings=32
    )
    model = transformers.OPTForCausalLM(config)
    step = step_of(model, language_loss, plan=ts.plans.fsdp_tp(model, make_mesh((4, 2)), sequence=True))
    step.prove(step.init(), torch.randint(3, 64, (8, 16))).raise_if_different()


@pytest.mark.parametrize("ep", ["batch", pytest.param("model", marks=pytest.mark.slow)])
def test_experts_are_given_a_stream_that_is_split_along_its_sequence(ep: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=1, vocab_size=64))
    plan = ts.plans.expert(model, make_mesh((4, 2)), ep=ep, tp="model", sequence=True)
    assert plan.activations["model.layers.0.input_layernorm"] == P("batch", "model", None)
    assert plan.activations["model.layers.0.mlp:hidden_states"] == P("batch", None, None)
    assert plan.rules["model.layers.0.mlp.experts.down_proj"][0] == ep
    step = step_of(model, language_loss, plan=plan)
    step.prove(step.init(), torch.randint(0, 64, (8, 16))).raise_if_different()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("from_logical", r"logical axes are named by recipes and rules here: .*plans\.fsdp_tp\(model, mesh"),
        (
            "from_accelerate",
            r"the sizes of a ParallelismConfig are axes of ts\.make_mesh\(dp_replicate=2, dp_shard=4\)",
        ),
        ("ddp", r"it is plans\.replicated\(\)"),
    ],
)
def test_readers_that_are_gone_say_what_is_written_instead(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"torch_shard.plans has no {name}: {advice}"):
        getattr(ts.plans, name)


def test_the_recipes_named_for_the_sizes_of_accelerate_are_those_of_its_fsdp() -> None:
    mesh = ts.make_mesh(dp_replicate=2, dp_shard=4)
    plan = ts.plans.hsdp(nn.Linear(8, 8), mesh, replicate="dp_replicate", fsdp="dp_shard")
    assert (plan.rules["weight"], plan.rows) == (P("dp_shard", None), ("dp_replicate", "dp_shard"))
