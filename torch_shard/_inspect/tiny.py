"""Small models of the hub with random values, which `torch-shard prove` knows by name."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from torch_shard._common.types import PyTree
from torch_shard._sharding import LossFn

ROWS, LENGTH, WORDS = 8, 16, 64

_LLAMA: Mapping[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TINY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-tiny": ("Llama", _LLAMA),
    "gemma3-tiny": ("Gemma3", {**_LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "mixtral-tiny": ("Mixtral", {**_LLAMA, "num_local_experts": 4}),
    "qwen3-moe-tiny": ("Qwen3Moe", {**_LLAMA, "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 32}),
}
"""By name: of the class in transformers, and the fields of its configuration."""


def tiny(name: str) -> tuple[torch.nn.Module, LossFn, PyTree]:
    """A model, its loss, and a batch.

    Args:
        name: One of `TINY`.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"{name} is a model of transformers: pip install 'torch_shard[hf]'.") from error
    family, fields = TINY[name]
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config(**fields))
        tokens = torch.randint(3, WORDS, (ROWS, LENGTH))
    return model.eval(), loss_with_logits, {"input_ids": tokens, "labels": tokens}


def loss_with_logits(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, PyTree]:
    """The loss of a model of transformers, with its logits as a metric."""
    out = model(**batch)
    return out.loss, {"logits": out.logits}
