"""Trainers of TRL on a mesh beside themselves on the CPU, with `compute_loss` as TRL has it, and all that they log."""

import random
import tempfile
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import torch_shard as ts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]

TOLERANCE = 1e-5
"""Of float32, whose sums are taken in another order on a mesh; absolute for what is small, as margins of rewards."""


def llama(seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=2, use_cache=False, **tokens, **sizes)
    )


def letters() -> transformers.PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def rows(kind: type[Any]) -> datasets.Dataset:
    draw = random.Random(0)

    def word(length: int) -> str:
        return "".join(draw.choice("abcdefgh") for _ in range(length))

    def row() -> dict[str, str]:
        if kind is trl.SFTTrainer:
            return {"text": word(10)}
        return {"prompt": word(4), "chosen": word(5), "rejected": word(5)}

    return datasets.Dataset.from_list([row() for _ in range(96)])


@pytest.mark.parametrize(("kind", "config"), [(trl.SFTTrainer, trl.SFTConfig), (trl.DPOTrainer, trl.DPOConfig)])
def test_a_run_is_that_of_the_cpu(kind: type[Any], config: type[Any]):
    data, runs = rows(kind), []
    for on_mesh in (False, True):
        per_device = 4 if on_mesh else 16
        args = config(
            tempfile.mkdtemp(),
            max_steps=20,
            per_device_train_batch_size=per_device,
            per_device_eval_batch_size=per_device,
            learning_rate=1e-3,  # as large steps as those of 1e-2 magnify rounding in losses of differences
            adam_epsilon=1e-4,  # Adam magnifies rounding where gradients are smaller than this
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=1,
        )
        more: dict[str, Any] = {"ref_model": llama(1)} if kind is trl.DPOTrainer else {}
        cls = kind
        if on_mesh:
            more["mesh"], cls = ts.make_mesh(batch=4, model=2), type("Mine", (ts.hf.OnMesh, kind), {})
        sets = {"train_dataset": data, "eval_dataset": data.select(range(32))}
        runs.append(cls(llama(0), args=args, processing_class=letters(), **sets, **more))
        runs[-1].train()

    theirs, ours = (run.state.log_history for run in runs)
    for expected, actual in zip(theirs, ours, strict=True):
        for name, value in expected.items():
            if not any(word in name for word in ("runtime", "per_second", "preparation")):
                assert actual[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    for name, value in runs[0].model.state_dict().items():
        trained = runs[1].model.state_dict()[name].cpu()
        torch.testing.assert_close(trained, value, rtol=1e-4, atol=1e-5)
