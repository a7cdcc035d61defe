"""Most families of transformers, shard by shard; `tests/plans` has a few of them."""

import pathlib

from tests.plans.test_hf_parallel import QWEN3_MOE, check_shards
from tests.tables.hf_models import GROUPED, HEADED, HF_MODELS, HFModel, causal

MORE = [
    QWEN3_MOE,
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
NAMED = ("Llama", "Qwen2", "Qwen3", "Qwen2Moe", "Mixtral", "Gemma2", "Gemma3", "DeepseekV3", "Phi3")
CHECKED = {*NAMED, *(model.name for model in MORE)}
EXPERTS = ("Mixtral-ep", "Qwen3Moe-ep", "GptOss-ep")


def test_shards_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    families = {model.name: model for model in [*HF_MODELS, *MORE]}
    check_shards({name: families[name.removesuffix("-ep")] for name in (*sorted(CHECKED), *EXPERTS)}, tmp_path)
