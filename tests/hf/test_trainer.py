"""`transformers.Trainer` on a mesh beside the same trainer on the CPU: logs, evaluations, files, weights are equal."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import torch_shard as ts

TOLERANCE = 1e-5
"""Of float32, whose sums are taken in another order on a mesh: of numbers in logs, and of a tensor's largest weight."""

BFLOAT16 = {"loss": 3e-4, "eval_loss": 3e-4, "grad_norm": 1e-2}
"""A rounding to 8 bits is one of 4e-3 at most, and the policies of CPU and CUDA round other values. A loss is the mean
over many of them."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


# ---- models and data ----


def llama(**more: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 3, "use_cache": False}
    config = transformers.LlamaConfig(vocab_size=64, **sizes | layers | more)
    return transformers.LlamaForCausalLM(config)


def t5() -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> transformers.ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes)
    return transformers.ViTForImageClassification(config)


def lora() -> nn.Module:
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def texts(num: int, *, shortest: int = 12) -> list[dict[str, Any]]:
    """Rows of up to 12 tokens, as they are padded by `padded`."""
    draws = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(num):
        length = int(torch.randint(shortest, 13, (), generator=draws))
        tokens = torch.randint(1, 64, (length,), generator=draws)
        rows.append({"input_ids": tokens, "labels": tokens.clone()})
    return rows


def padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def pad(tokens: list[torch.Tensor], value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=value)

    mask = [torch.ones_like(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad([row["input_ids"] for row in rows], 0),
        "attention_mask": pad(mask, 0),
        "labels": pad([row["labels"] for row in rows], -100),
    }


def pairs(num: int) -> list[dict[str, Any]]:
    """Of a sentence and another one, in which some labels do not count."""
    draws = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(num):
        tokens = torch.randint(1, 64, (8,), generator=draws)
        shifted = torch.cat([torch.zeros(1, dtype=torch.long), tokens[:-1]])
        labels = torch.where(torch.rand(8, generator=draws) < 0.2, -100, tokens)
        source = torch.randint(1, 64, (10,), generator=draws)
        rows.append({"input_ids": source, "decoder_input_ids": shifted, "labels": labels})
    return rows


def pictures(num: int) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)

    def label() -> int:
        return int(torch.randint(0, 5, (), generator=draws))

    return [{"pixel_values": torch.randn(3, 16, 16, generator=draws), "labels": label()} for _ in range(num)]


# ---- a run ----


class OwnLoss(Trainer):
    """Means over microbatches, whatever their tokens."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    assert isinstance(prediction.predictions, np.ndarray)
    assert prediction.label_ids.dtype == np.int64
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "num_rows": len(right)}


def of_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def trainer(
    on_mesh: bool,
    model: Callable[[], nn.Module] | nn.Module = llama,
    kind: type[Trainer] = Trainer,
    *,
    data: Any = None,
    held_out: Any = None,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer of 16 rows a batch, on the CPU or on four devices by two."""
    rows = 4 if on_mesh else 16
    arguments: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # Adam magnifies rounding where gradients are smaller than this
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    args = TrainingArguments(tempfile.mkdtemp(), **arguments | options)
    sets = {"train_dataset": texts(96) if data is None else data, "eval_dataset": held_out or texts(20)}
    built = model if isinstance(model, nn.Module) else model()
    if not on_mesh:
        return kind(built, args, **sets, **given or {})
    cls = ts.hf.Trainer if kind is Trainer else type("Mine", (ts.hf.OnMesh, kind), {})
    return cls(built, args, mesh=ts.make_mesh(batch=4, model=2), **sets, **given or {})


def weights(ran: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().double() for name, value in ran.model.state_dict().items()}


def numbers(ran: Trainer) -> list[dict[str, float]]:
    """What a run has logged, without times and what is of a whole call of `train`."""

    def counts(name: str) -> bool:
        return not any(word in name for word in ("runtime", "per_second", "preparation", "train_loss", "total_flos"))

    return [{name: value for name, value in entry.items() if counts(name)} for entry in ran.state.log_history]


def assert_equal(theirs: Trainer, ours: Trainer, tolerance: float = TOLERANCE) -> None:
    assert len(numbers(theirs)) > 3
    for expected, actual in zip(numbers(theirs), numbers(ours), strict=True):
        assert actual == pytest.approx(expected, rel=tolerance)
    for name, value in weights(theirs).items():
        far = (weights(ours)[name] - value).abs().max()
        assert far <= tolerance * value.abs().max() + 1e-7, name  # the bias of keys has no gradient but rounding


def both(*args: Any, **options: Any) -> tuple[Any, Any]:
    theirs, ours = (trainer(on_mesh, *args, **options) for on_mesh in (False, True))
    for each in (theirs, ours):
        each.train()
    return theirs, ours


# ---- it trains as it does on the CPU ----


def test_a_run_is_that_of_the_cpu():
    """Evaluations, metrics, a last batch of five rows, what callbacks and the user see of the model."""
    seen: dict[bool, list[float]] = {False: [], True: []}

    def callback(on_mesh: bool) -> transformers.TrainerCallback:
        class Sees(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
                seen[on_mesh].append(float(model.lm_head.weight.detach().abs().sum()))

        return Sees()

    runs = []
    for on_mesh in (False, True):
        given = {"callbacks": [callback(on_mesh)], "compute_metrics": accuracy}
        options = {"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}
        data = {"data": texts(37), "held_out": texts(21)}
        runs.append(trainer(on_mesh, lambda: llama(num_hidden_layers=1), given=given, **data, **options))
        runs[-1].train()
    assert_equal(*runs)
    assert runs[1].state.global_step == 6
    assert seen[True] == pytest.approx(seen[False], rel=TOLERANCE)
    theirs, ours = (run.predict(texts(21)) for run in runs)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, atol=1e-5)
    assert (ours.label_ids == theirs.label_ids).all()
    assert ours.metrics["test_accuracy"] == theirs.metrics["test_accuracy"]


def test_a_checkpoint_goes_on_elsewhere_and_back(tmp_path: Path):
    """Its files are those of the trainer on the CPU, with the moments."""
    options = {"save_strategy": "steps", "save_steps": 3}

    def model() -> nn.Module:
        return llama(num_hidden_layers=1, attention_dropout=0.0)

    whole = trainer(False, model, **options)
    whole.train()
    saved = {whole: f"{whole.args.output_dir}/checkpoint-3"}

    ours = trainer(True, model, **options)
    ours.train(resume_from_checkpoint=saved[whole])
    for expected, actual in zip(numbers(whole)[-3:], numbers(ours)[-3:], strict=True):
        assert actual == pytest.approx(expected, rel=TOLERANCE)

    files = {*os.listdir(f"{ours.args.output_dir}/checkpoint-6")}
    assert files == {*os.listdir(f"{whole.args.output_dir}/checkpoint-6")}
    theirs, mine = (
        torch.load(f"{run.args.output_dir}/checkpoint-6/optimizer.pt", weights_only=True) for run in (whole, ours)
    )
    assert theirs["param_groups"] == mine["param_groups"]
    assert theirs["state"].keys() == mine["state"].keys()
    for number, moments in theirs["state"].items():
        for name, expected in moments.items():
            torch.testing.assert_close(mine["state"][number][name], expected, rtol=1e-4, atol=1e-8)

    back = trainer(False, model, **options, max_steps=8)
    back.train(resume_from_checkpoint=f"{ours.args.output_dir}/checkpoint-6")
    straight = trainer(False, model, **options, max_steps=8)
    straight.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-6")
    assert numbers(back)[-1] == pytest.approx(numbers(straight)[-1], rel=TOLERANCE)


CASES: dict[str, dict[str, Any]] = {
    "llama, 20 steps": {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 5},
    "t5, label smoothing": {
        "model": t5,
        "data": pairs(96),
        "held_out": pairs(20),
        "label_smoothing_factor": 0.1,
        "max_steps": 20,
        "eval_strategy": "steps",
        "eval_steps": 5,
    },
    "vit": {
        "model": vit,
        "data": pictures(96),
        "held_out": pictures(20),
        "max_steps": 20,
        "eval_strategy": "steps",
        "eval_steps": 5,
    },
    "own loss": {"kind": OwnLoss, "max_steps": 20, "eval_strategy": "steps", "eval_steps": 5},
    "own loss, microbatches": {
        "kind": OwnLoss,
        "data": texts(80),
        "gradient_accumulation_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
    },
    "a function for the loss": {"given": {"compute_loss_func": of_tokens}, "gradient_accumulation_steps": 2},
    "microbatches of unlike lengths": {
        "data": texts(176, shortest=3),
        "given": {"data_collator": padded},
        "gradient_accumulation_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
    },
    "activation checkpointing, no clipping": {"activation_checkpointing": True, "max_grad_norm": 0.0},
    "sgd, a plateau": {
        "optim": "sgd",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "warmup_steps": 0,
    },
    "lora": {"model": lora, "eval_strategy": "steps", "eval_steps": 3},
}


OF_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@OF_PEFT
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_the_cpu_for(case: str):
    theirs, ours = both(**CASES[case])
    assert_equal(theirs, ours)


@pytest.mark.slow
def test_bf16_is_autocast():
    theirs, ours = both(bf16=True, eval_strategy="steps", eval_steps=3)
    for expected, actual in zip(numbers(theirs), numbers(ours), strict=True):
        for name, tolerance in BFLOAT16.items():
            assert actual.get(name) == (pytest.approx(expected[name], rel=tolerance) if name in expected else None)
    assert {value.dtype for value in ours.model.state_dict().values()} == {torch.float32}
    assert ours.predict(texts(16)).predictions.dtype == np.float32


@pytest.mark.slow
def test_activation_checkpointing_computes_layers_again():
    def memory(**options: Any) -> int:
        model = llama(num_hidden_layers=8, hidden_size=64, intermediate_size=256)
        ran = trainer(True, model, data=texts(32), max_steps=1, **options)
        ran.train()
        return ran.train_step.programs[0].memory.temporaries

    assert memory(activation_checkpointing=True) < 0.7 * memory()


@pytest.mark.slow
def test_a_run_with_dropout_goes_on_bit_for_bit():
    def model() -> nn.Module:
        return llama(attention_dropout=0.3)

    options = {"save_strategy": "steps", "save_steps": 3}
    whole, resumed = (trainer(True, model, **options) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert numbers(resumed) == numbers(whole)
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())

    whole.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")  # into a model that is on the mesh
    assert numbers(resumed) == numbers(whole)


@OF_PEFT
@pytest.mark.slow
@pytest.mark.parametrize("model", [llama, lora])
def test_the_best_model_is_loaded_and_training_stops_early(model: Callable[[], nn.Module]):
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "learning_rate": 0.1,
        "max_steps": 12,
        "save_total_limit": 1,
    }
    given = {"callbacks": [transformers.EarlyStoppingCallback(1)], "compute_metrics": accuracy}
    theirs, ours = both(model, given=given, **options)
    assert ours.state.global_step == theirs.state.global_step < 12
    assert_equal(theirs, ours, tolerance=1e-4)  # a tenth at a step: ten times as far
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=TOLERANCE)


@pytest.mark.slow
def test_an_optimizer_of_the_user_trains_twice():
    runs = []
    for on_mesh in (False, True):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pair = optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        options = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 3}
        runs.append(trainer(on_mesh, model, given={"optimizers": pair}, **options))
        runs[-1].evaluate()
        runs[-1].train()
        runs[-1].train()
    assert_equal(*runs)
    assert runs[1].train_step.num_compiles == 1
    theirs, ours = (run.predict([{"input_ids": row["input_ids"]} for row in texts(16)]) for run in runs)
    assert ours.label_ids is None
    np.testing.assert_allclose(ours.predictions, theirs.predictions, atol=1e-5)


@pytest.mark.slow
def test_a_model_is_made_anew_at_each_call():
    runs = []
    for on_mesh in (False, True):
        rows = 4 if on_mesh else 16
        args = TrainingArguments(
            tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=rows, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        kind = ts.hf.Trainer if on_mesh else Trainer
        more: dict[str, Any] = {"mesh": ts.make_mesh(batch=4, model=2), "plan": ts.plans.fsdp} if on_mesh else {}
        runs.append(kind(model_init=lambda: llama(), args=args, train_dataset=texts(64), **more))
        runs[-1].train()
        runs[-1].train()
    assert_equal(*runs)


# ---- arguments ----

REFUSED: dict[str, dict[str, Any]] = {
    "fp16=True: use bf16=True": {"fp16": True},
    "torch_compile=True: the step is compiled": {"torch_compile": True},
    "auto_find_batch_size=True: trainer.train_step.preview": {"auto_find_batch_size": True},
    "bf16_full_eval=True: an evaluation computes": {"bf16_full_eval": True},
    "use_liger_kernel=True: XLA fuses": {"use_liger_kernel": True},
    r"debug=.*UNDERFLOW.*: ts.find_nan": {"debug": "underflow_overflow"},
    "offload: step_options": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_meant_is_refused_before_anything_runs(message: str):
    with pytest.raises(NotImplementedError, match=f"^Trainer: .* cannot be meant on a mesh(.|\n)*{message}"):
        trainer(True, **REFUSED[message])


def test_arguments_of_wrappers_are_refused():
    """Those that transformers itself takes only where their package is, or where torch has a GPU."""
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True)
    args.deepspeed, args.fsdp = "zero3.json", "full_shard"
    with pytest.raises(
        NotImplementedError, match=r"deepspeed='zero3.json': the plan .*\n  fsdp='full_shard': the plan"
    ):
        ts.hf.Trainer(llama(), args, mesh=ts.make_mesh(batch=4))


def test_generation_within_an_evaluation_is_refused():
    args = Seq2SeqTrainingArguments(tempfile.mkdtemp(), predict_with_generate=True, use_cpu=True)
    with pytest.raises(NotImplementedError, match="predict_with_generate=True: generate after training"):
        type("Mine", (ts.hf.OnMesh, Seq2SeqTrainer), {})(t5(), args, mesh=ts.make_mesh(batch=4))


def test_options_that_arguments_say_are_refused():
    with pytest.raises(TypeError, match="step_options has 'compute_dtype', which bf16 of TrainingArguments says here"):
        ts.hf.Trainer(llama(), mesh=ts.make_mesh(batch=4), step_options={"compute_dtype": torch.bfloat16})


def test_an_optimizer_that_is_not_taken_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"the optimizer is a transformers\.optimization\.Adafactor"):
        trainer(True, optim="adafactor").train()


def test_batches_have_the_rows_of_all_devices(tmp_path: Path):
    """Along the axes of the batch; the user's own arguments stay as they are, and so do those in a file."""
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, per_device_eval_batch_size=3, use_cpu=True)
    ours = ts.hf.Trainer(llama(), args, mesh=ts.make_mesh(batch=4, model=2), train_dataset=texts(64))
    assert (ours.args.train_batch_size, ours.args.eval_batch_size) == (8, 12)
    assert ours.args.per_device_train_batch_size == 2
    assert len(ours.get_train_dataloader()) == 8
    assert ours.get_total_train_batch_size(ours.args) == 8
    assert args.train_batch_size == 2

    torch.save(ours.args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert type(loaded) is TrainingArguments
    assert dataclasses.asdict(loaded) == dataclasses.asdict(args)

    replicas = ts.make_mesh(replica=2, batch=4)
    ours = ts.hf.Trainer(llama(), args, mesh=replicas, plan=ts.plans.hsdp)
    assert ours.args.train_batch_size == 16
