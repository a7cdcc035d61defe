"""Moments and activations in the host's memory: what Llama 3 8B then takes of TPUs, by their own compiler."""

from collections.abc import Iterator
from typing import Any

import optax
import torch
import transformers

import torch_shard as ts
from benchmarks.rows import Row

GIB = 2**30

LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}

CASES = (
    ("torch", None, 2048),
    ("torch", "optimizer", 2048),
    ("optax", "optimizer", 2048),
    ("torch", ("optimizer", "activations"), 2048),
    ("torch", "optimizer", 8192),
    ("torch", ("optimizer", "activations"), 8192),
)
"""The library of AdamW, what is offloaded, and how many tokens a row has."""


def rows(quick: bool) -> Iterator[Row]:
    """The memory of one device of eight, over what it has; 8 rows a step, FSDP, bfloat16, remat of each layer."""
    config = transformers.LlamaConfig(**(SMALL if quick else LLAMA), use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    mesh = ts.make_mesh(topology="v5e:2x4", batch=8)
    for library, offload, length in CASES[: 3 if quick else None]:
        length = 128 if quick else length
        optimizer: Any = torch.optim.AdamW(model.parameters()) if library == "torch" else optax.adamw(1e-3)
        step = ts.make_train_step(
            model,
            lambda model, batch: model(**batch).loss,
            optimizer,
            mesh=mesh,
            plan=ts.plans.fsdp(model, mesh),
            compute_dtype=torch.bfloat16,
            remat="block",
            offload=offload,
        )
        tokens = torch.empty((8, length), dtype=torch.long, device="meta")
        found = step.preview({"input_ids": tokens, "labels": tokens})
        memory, limit = found.memory, found.limit or 0
        note = f"host {memory.host / GIB:.2f} GiB, transfers {found.host_seconds or 0:.2f} s" if offload else ""
        name = f"{library}, offload={offload}, 8 x {length}"
        yield Row(name, f"{memory.peak / GIB:.2f} GiB", f"{limit / GIB:.2f} GiB", memory.peak / limit, note=note)
