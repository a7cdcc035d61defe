"""Tiny Hugging Face models with random weights: each with its batches, its loss and its plan on a (4, 2) mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from jax.sharding import PartitionSpec as P
from torch import nn

from tests.tables.cases import BATCH, Case

LENGTH, VOCAB = 8, 64
Batch = dict[str, torch.Tensor]

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADED = {**GROUPED, "head_dim": 8}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MOE = ("grouped_mm", "batched_mm")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def clip_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


def padded(low: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and a mask; rows end early by different amounts."""
    tokens = torch.randint(low, VOCAB, (BATCH, LENGTH))
    lengths = torch.arange(BATCH) % 4 + LENGTH - 3
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return tokens * mask, mask


def language() -> Batch:
    tokens, mask = padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def translation() -> Batch:
    tokens, mask = padded()
    labels, seen = padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(seen == 0, -100)}


def classes_of(size: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 4, (BATCH,))}


def pairs() -> Batch:
    tokens, mask = padded(low=3)
    ends = (mask.sum(1, keepdim=True) - 1).expand(-1, LENGTH)
    tokens = torch.where(torch.arange(LENGTH) == ends, 2, tokens)  # CLIP pools at the end-of-text token
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": torch.randn(BATCH, 3, 16, 16)}


def speech() -> Batch:
    labels, seen = padded()
    return {"input_features": torch.randn(BATCH, 8, 16), "labels": labels.masked_fill(seen == 0, -100)}


def megatron(columns: str, rows: str, **more: P) -> dict[str, P]:
    """Layers named in `columns` split their outputs over `model`, those in `rows` their inputs."""
    split = {f"**.{name}.weight": P("model", None) for name in columns.split()}
    return split | {f"**.{name}.weight": P(None, "model") for name in rows.split()} | more


LLAMA_RULES = megatron("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj")
VOCABULARY: dict[str, P] = {"**.embed_tokens.weight": P("model", None), "lm_head.weight": P("model", None)}
EXPERTS: dict[str, P] = {
    "**.experts.gate_up_proj": P("model", None, None),
    "**.experts.down_proj": P("model", None, None),
}
ATTENTION_RULES = megatron("q_proj k_proj v_proj", "o_proj")
BERT_RULES = megatron("query key value", "attention.output.dense") | {
    "**.intermediate.dense.weight": P("model", None),
    "**.intermediate.dense.bias": P("model"),
}
BART_RULES = megatron("q_proj k_proj v_proj fc1", "out_proj fc2")


@dataclasses.dataclass(frozen=True)
class HFModel:
    """One architecture.

    Attributes:
        name: Of the test.
        model: Class of the model in transformers.
        config: Class of its configuration.
        fields: Of the configuration.
        batch: Makes a batch; rows are examples.
        rules: Of the plan; everything else is replicated.
        loss_fn: Of a model and a batch.
        attention: The implementations of attention that it has.
        experts: The implementations of experts that compile for fixed shapes; none for a dense model.
    """

    name: str
    model: str
    config: str
    fields: dict[str, Any]
    batch: Callable[[], Batch]
    rules: dict[str, P]
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor] = model_loss
    attention: tuple[str, ...] = ("sdpa", "eager")
    experts: tuple[str, ...] = ()

    def build(self, attention: str, experts: str | None = None) -> nn.Module:
        """The model with random weights, all of them: no bias is zero and no scale is one."""
        config = getattr(transformers, self.config)(**self.fields)
        model = getattr(transformers, self.model)._from_config(config, attn_implementation=attention)
        if experts is not None:
            model.set_experts_implementation(experts)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def cases(self) -> list[Case]:
        """A case for each implementation of attention and experts; first the one that users get."""
        choices = itertools.product(self.attention, self.experts or (None,))
        return [self._case(attention, experts) for attention, experts in choices]

    def _case(self, attention: str, experts: str | None) -> Case:
        name = "-".join(filter(None, (self.name, attention, experts)))
        build = functools.partial(self.build, attention, experts)
        # rtol: some thousand float32 terms in another order, amplified by softmax and norms
        return Case(name, build, self.batch, self.rules, loss_fn=self.loss_fn, rtol=5e-5)


def causal(name: str, fields: dict[str, Any], rules: dict[str, P], **more: Any) -> HFModel:
    return HFModel(name, f"{name}ForCausalLM", f"{name}Config", fields, language, rules, **more)


HF_MODELS = [
    HFModel(
        "GPT2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "use_cache": True}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        language,
        {
            "**.c_attn.weight": P(None, "model"),
            "**.c_fc.weight": P(None, "model"),
            "**.c_proj.weight": P("model", None),
            "**.wte.weight": P("model", None),
        },
    ),
    causal("Llama", GROUPED, LLAMA_RULES | VOCABULARY),
    causal("Qwen2", GROUPED, LLAMA_RULES | VOCABULARY),
    causal("Qwen3", HEADED, LLAMA_RULES | VOCABULARY),
    causal(
        "Gemma2",
        {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 8},
        LLAMA_RULES,
        attention=("eager",),
    ),
    HFModel(
        "Gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 8},
        language,
        LLAMA_RULES,
    ),
    causal(
        "Phi3",
        {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
        megatron("qkv_proj gate_up_proj", "o_proj down_proj"),
    ),
    causal(
        "Mixtral",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
        ATTENTION_RULES | EXPERTS,
        experts=MOE,
    ),
    causal(
        "Qwen2Moe",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        LLAMA_RULES | EXPERTS,
        experts=MOE,
    ),
    causal(
        "DeepseekV3",
        {
            **TEXT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "pad_token_id": 0,
        },
        megatron("q_b_proj kv_b_proj gate_proj up_proj", "o_proj down_proj") | EXPERTS,
        experts=MOE,
    ),
    causal(
        "GptOss",
        {**HEADED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        ATTENTION_RULES | EXPERTS | {"**.sinks": P("model")},
        attention=("eager",),
        experts=MOE,
    ),
    causal(
        "Bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        {"**.query_key_value.weight": P("model", None), "**.dense.weight": P(None, "model")},
        attention=("eager",),
    ),
    HFModel(
        "Bert",
        "BertForMaskedLM",
        "BertConfig",
        {**TEXT, **NO_DROPOUT},
        language,
        BERT_RULES,
    ),
    HFModel(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
        translation,
        megatron("q k v wi", "o wo") | {"shared.weight": P("model", None)},
    ),
    HFModel(
        "ViT",
        "ViTForImageClassification",
        "ViTConfig",
        {**IMAGE, **NO_DROPOUT, "num_labels": 4},
        classes_of(16),
        megatron("q_proj k_proj v_proj fc1", "o_proj fc2"),
    ),
    HFModel(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "projection_dim": 16},
            "vision_config": {**IMAGE, "projection_dim": 16},
            "projection_dim": 16,
        },
        pairs,
        BART_RULES,
        loss_fn=clip_loss,
    ),
    HFModel(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        speech,
        BART_RULES,
    ),
    HFModel(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "expand": 2},
        language,
        {"**.in_proj.weight": P("model", None), "**.out_proj.weight": P(None, "model")},
        attention=("eager",),
    ),
]
