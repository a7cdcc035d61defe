"""Plans by logical names: specs are those of flax, and counts those that MaxText publishes."""

# ruff: noqa: E501

import logging
import math

import jax
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.dtensor import make_model
from torch_shard._plans.from_logical import read_rules

MESH = ts.make_mesh(batch=4, model=2)

TENSOR = ["tensor", "tensor_sequence", "autoregressive"]
FSDP = ["fsdp", "fsdp_transpose", "context", "context_usp_ulysses"]
MAXTEXT = [
    ("vocab", TENSOR),
    ("embed_vocab", [*FSDP, "expert"]),
    *((name, TENSOR) for name in ("heads", "q_heads", "kv_heads")),
    *((name, []) for name in ("qkv", "kv", "kv_head_dim", "q_lora_up_proj", "kv_lora_up_proj")),
    *((name, [*FSDP, "expert"]) for name in ("q_lora", "kv_lora")),
    ("exp", "expert"),
    ("mlp_moe", ["fsdp_transpose", *TENSOR]),
    ("embed_moe", FSDP),
    ("embed_moe", ["fsdp", "context", "context_usp_ulysses"]),
    ("activation_mlp", ["tensor", "tensor_sequence"]),
    ("activation_embed", ["tensor"]),
    ("mlp", ["fsdp_transpose", *TENSOR]),
    ("embed", [*FSDP, "expert"]),
    ("embed", ["fsdp", "context", "context_usp_ulysses", "expert"]),
    ("norm", ["tensor"]),
    ("layers", "stage"),
]
"""Those of weights in MaxText's base.yml."""


def simulate(**sizes):
    """A mesh that is only counted with, of more devices than there are."""
    num = math.prod(sizes.values())
    devices = np.array([jax.devices()[0]] * num).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}


def qwen3(num_hidden_layers=28):
    return transformers.Qwen3Config(**QWEN3, num_hidden_layers=num_hidden_layers)


def gpt_oss():
    return transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def deepseek2():
    return transformers.DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        first_k_dense_replace=1,
        vocab_size=102400,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize(
    ("config", "sizes", "total", "per_device"),
    [
        (qwen3, {"fsdp": 16}, 596_049_920, 37_314_560),
        (gpt_oss, {"fsdp": 16}, 20_914_757_184, 1_313_642_784),
        (deepseek2, {"fsdp": 4, "expert": 4}, 15_706_484_224, 982_412_800),
    ],
    ids=["qwen3-0.6b", "gpt-oss-20b", "deepseek2-16b"],
)
def test_counts_per_device_are_those_that_maxtext_publishes(config, sizes, total, per_device, caplog):
    """tests/utils/sharding_info of MaxText: tpu7x-16, and v6e-16 with rule_default."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config())
    mesh = simulate(**sizes)
    with caplog.at_level(logging.WARNING):
        resolved = ts.plans.from_logical(model, mesh, MAXTEXT, strict=True).resolve(model, mesh)
    params = dict(model.named_parameters())
    assert sum(p.numel() for p in params.values()) == total
    assert sum(math.prod(resolved.entries[name].local_shape) for name in params) == per_device
    assert not caplog.text


FLAX = [
    # The example of flax.linen.spmd.logical_to_mesh_axes.
    (
        ("batch", "length", "heads", "features"),
        [("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z")],
        ("X", None, "Y", None),
    ),
    (("a", "b"), [("a", "X"), ("b", "X"), ("b", "Y")], ("X", "Y")),  # a fallback, as the first is taken
    (("a", "b"), [("b", "X"), ("a", "X")], (None, "X")),  # the order of rules, not that of dims
    (("a", "b"), [("a", ["X", "Y"]), ("b", ["Y", "Z"]), ("b", "Z")], (("X", "Y"), "Z")),  # one axis taken is enough
    (("a",), [("a", None), ("a", "X")], (None,)),  # whole is a choice too
    (("a",), [("a", []), ("a", "X")], (None,)),
    (("a", None), [("b", "X")], (None, None)),
    (("a", P.UNCONSTRAINED), [("a", "X")], ("X", P.UNCONSTRAINED)),
]


@pytest.mark.parametrize(("dims", "rules", "expected"), FLAX)
def test_rules_count_as_in_flax(dims, rules, expected):
    assert tuple(read_rules(rules, dict.fromkeys("XYZ", 2)).spec_of(dims)) == expected


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_specs_are_those_of_flax_itself(data):
    spmd = pytest.importorskip("flax.linen.spmd", reason="pip install 'torch_shard[bench]'")

    names = st.sampled_from(["a", "b", "c", "d"])
    axes = st.one_of(st.none(), st.sampled_from("XYZ"), st.lists(st.sampled_from("XYZ"), unique=True))
    dims = data.draw(st.lists(names, unique=True, max_size=4))
    rules = data.draw(st.lists(st.tuples(names, axes), max_size=8))
    theirs = spmd.logical_to_mesh_axes(dims, rules)
    plain = [
        part if isinstance(part, str) else None if not part else part[0] if len(part) == 1 else tuple(part)
        for part in theirs
    ]
    assert list(read_rules(rules, dict.fromkeys("XYZ", 2)).spec_of(dims)) == plain


def test_axes_without_devices_take_part_and_are_left_out():
    """`remove_size_one_mesh_axis` of MaxText comes after the choice: `b` falls back though Y is no axis of the mesh."""
    rules = read_rules([("a", ["X", "Y"]), ("b", ["Y", "Z"]), ("b", "Z"), ("c", "W")], {"X": 2, "Z": 2, "W": 1})
    assert tuple(rules.spec_of(["a", "b", "c"])) == ("X", "Z", None)


def test_names_of_the_user_and_of_one_dim_that_is_several():
    model = make_model()
    rules = [("rows", "model"), ("heads", "model"), ("kv", "batch"), ("act", "batch")]
    names = {"embed.weight": ("rows", None), "layers.*.up.weight": (("heads", "kv"), None)}
    plan = ts.plans.from_logical(
        model, MESH, rules, names=names, activations={"layers.*": ("act", None, P.UNCONSTRAINED)}
    )
    assert plan.rules["embed.weight"] == P("model", None)
    assert plan.rules["layers.*.up.weight"] == P(("model", "batch"), None)
    assert plan.activations == {"layers.*": P("batch", None, P.UNCONSTRAINED)}
    assert plan.reasons["layers.*.up.weight"] == "(heads x kv, -)"


def test_older_names_count_where_rules_know_no_newer_ones():
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(qwen3(num_hidden_layers=1))
    plan = ts.plans.from_logical(
        model, MESH, [("heads", "model"), ("mlp", "model"), ("embed", "batch"), ("vocab", "model")]
    )
    assert plan.rules["model.embed_tokens.weight"] == P("model", "batch")
    for name in "qkv":
        assert plan.rules[f"model.layers.0.self_attn.{name}_proj.weight"] == P("model", "batch")
    assert plan.rules["model.layers.0.mlp.down_proj.weight"] == P("batch", "model")


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.own = 3, nn.Parameter(torch.zeros(4, 6))
        self.q_proj, self.odd = nn.Linear(6, 6), nn.Linear(6, 9)


def test_what_does_not_fit_is_listed_with_its_bytes(caplog):
    rules = [("heads", "model"), ("mlp", "model")]
    with caplog.at_level(logging.WARNING):
        plan = ts.plans.from_logical(Heads(), MESH, rules)
    lines = [line.strip() for line in caplog.text.splitlines()[2:]]
    assert set(plan.rules.values()) == {P()}
    assert lines == [
        "own (4, 6), 96 bytes, whole: of no known layer: its dims have no names; give them by names=",
        "q_proj.weight (6, 6), 144 bytes, whole: (heads x kv, embed): 3 heads are not a multiple of model=2, and would be cut",
        "q_proj.bias (6,), 24 bytes, whole: (heads x kv): 3 heads are not a multiple of model=2, and would be cut",
        "odd.weight (9, 6), 216 bytes, whole: (mlp, embed): dim 0 = 9 is not a multiple of model=2",
        "odd.bias (9,), 36 bytes, whole: (mlp): dim 0 = 9 is not a multiple of model=2",
    ]
    with pytest.raises(ValueError, match=r"plans.from_logical: 5 entries do not divide over the mesh"):
        ts.plans.from_logical(Heads(), MESH, rules, strict=True)


def test_all_names_that_cannot_be_read_are_said_together():
    names = {
        "nothing": ("a",),
        "embed.weight": ("a",),
        "head.*": ("a",),
        "head.weight": ("a", "a"),
        "layers.*.up.bias": ("a",),
        "layers.0.*.bias": ("b",),
    }
    with pytest.raises(ValueError, match="names cannot be read") as error:
        ts.plans.from_logical(make_model(), MESH, [], names=names, activations={"head": ("a", "a", None)})
    assert [line.strip() for line in str(error.value).splitlines()[2:]] == [
        '"nothing" matches no entry.',
        'embed.weight (32, 8): "embed.weight" has 1 names.',
        'head.weight (32, 8): "head.*" has 1 names.',
        'layers.0.up.bias: "layers.*.up.bias" and "layers.0.*.bias" give it different names. Add "layers.0.up.bias" itself.',
        '"head.weight": a is the name of two dims. Give each dim its own.',
        'activations "head": a is the name of two dims. Give each dim its own.',
    ]


def test_rules_that_split_nothing_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ts.plans.from_logical(nn.Linear(4, 16), ts.make_mesh(batch=4, model=2), [("mpl", "model")])
    assert "from_logical: no rule splits a parameter of this model. Its dims are called: embed, mlp." in caplog.text
