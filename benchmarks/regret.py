"""What `ts.tune` costs those who follow it: its choice over the best of five recipes by hand, and over the default.

Ten small models, each in a process of its own, tuned for five minutes. One alone:
`python -m benchmarks --only regret --models bert`.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row, chosen
from benchmarks.tpu_cases import class_loss, hf_gpt, hf_llama, hf_qwen, hf_resnet, hf_vit, next_token_loss, tokens
from benchmarks.tpu_gpt import Gpt
from benchmarks.tpu_llama import Llama
from benchmarks.tpu_qwen import Qwen
from benchmarks.tpu_resnet import BASIC
from benchmarks.tpu_vit import Vit
from benchmarks.tpu_zoo import images, on_meta, own_loss
from benchmarks.tuning import TuningCase, both, data
from torch_shard._tune.candidates import Candidate

MINUTES, MOST = 5, 1.05
"""For a search; and its choice over the best by hand, at most."""


def _case(
    model: Callable[[], nn.Module], loss_fn: Callable[..., torch.Tensor], batch: Any, *, moe: bool = False
) -> TuningCase:
    wide = ("expert(tp)", "expert") if moe else ("fsdp_tp", "fsdp_tp(sequence)")
    by_hand = (
        data(8, "fsdp"),
        data(8, "replicated"),
        data(8, "fsdp", remat="block"),
        *(both(4, 2, recipe) for recipe in wide),
    )
    return TuningCase(model, loss_fn, batch, "v5e:2x4", by_hand)


def _llama(batch: torch.Tensor, **sizes: int) -> TuningCase:
    own = Llama(**{"width": 1024, "hidden": 2816, "heads": 16, "kv_heads": 4, "vocab": 32000} | sizes)
    return _case(lambda: hf_llama(own), next_token_loss, batch)


def _hub(kind: str, config: str, batch: Any, **sizes: Any) -> TuningCase:
    import transformers

    return _case(on_meta(kind, getattr(transformers, config)(**sizes)), own_loss, batch)


CASES: dict[str, Callable[[], TuningCase]] = {
    "llama": lambda: _llama(tokens(16, 1024)),
    "long": lambda: _llama(tokens(8, 16384), layers=2),
    "remat": lambda: _llama(tokens(64, 4096), layers=24, width=2048, hidden=5632),
    "qwen2": lambda: _hub(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"input_ids": tokens(16, 1024), "labels": tokens(16, 1024)},
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    ),
    "qwen3-moe": lambda: _case(
        lambda: hf_qwen(Qwen(layers=2, width=1024, hidden=512, heads=8, kv_heads=4, vocab=32000, experts=16, chosen=4)),
        next_token_loss,
        tokens(16, 1024),
        moe=True,
    ),
    "gpt2": lambda: _case(lambda: hf_gpt(Gpt(layers=3)), next_token_loss, tokens(64, 1024)),
    "bert": lambda: _hub(
        "BertForMaskedLM",
        "BertConfig",
        {"input_ids": tokens(64, 512), "labels": tokens(64, 512)},
        num_hidden_layers=2,
    ),
    "vit": lambda: _case(lambda: hf_vit(Vit(layers=2)), class_loss, images(256)),
    "resnet": lambda: _case(lambda: hf_resnet(BASIC), class_loss, images(256)),
    "convnext": lambda: _case(_convnext(), class_loss, images(128)),
}


def _convnext() -> Callable[[], nn.Module]:
    import transformers

    return on_meta("ConvNextForImageClassification", transformers.ConvNextConfig(depths=[1, 1, 1, 1], num_labels=1000))


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Two of each model: over the best by hand, and over the default."""
    for name in chosen(names, list(CASES)) if names or not quick else []:
        try:
            found = isolated("benchmarks.regret:measure", name=name)
        except Failed as error:
            yield Row(name, note=f"failed: {str(error)[-300:]}")
            continue
        for title, target in (("the best by hand", MOST), ("the default", 1.0)):
            what, ms = found[title]
            own = found["ms"]
            mine = f"{found['choice']}: " + (f"{own:.4g} ms" if own else "does not fit")
            ratio = own / ms if own and ms else None
            theirs = f"{what}: {ms:.4g} ms" if ms else f"{what}: does not fit"
            yield Row(f"{name}: ours ÷ {title}", mine, theirs, ratio, target=target, note=found["note"])


def measure(name: str, minutes: float = MINUTES) -> dict[str, Any]:
    """Milliseconds of the choice, of the default and of the best by hand, by TPU's compiler."""
    case = CASES[name]()
    with tempfile.TemporaryDirectory() as folder:
        search = case.search(Path(folder), time.monotonic() + 60 * minutes)
        search.run()
        choice, num = search.ranking()[0], len(search.measured)
        known = {str(candidate): found for candidate, found in search.measured.items()}

        def ms(candidate: Candidate) -> float | None:
            found = known.get(str(candidate)) or known.setdefault(str(candidate), search.measure(candidate))
            fits = not found.refused and (search.limit is None or found.memory <= search.limit)
            return found.seconds * 1e3 if fits else None

        hand = {str(candidate): found for candidate in case.by_hand if (found := ms(candidate))}
        best = min(hand, key=hand.__getitem__)
        return {
            "choice": str(choice),
            "ms": ms(choice),
            "the best by hand": (best, hand[best]),
            "the default": (str(search.default), ms(search.default)),
            "note": f"{num} compiled, {len(search.not_reached)} left for want of time",
        }
