# %% [markdown]
# # `transformers.Trainer` on a mesh: the trainer stays
#
# A script that trains with `Trainer` has its data, arguments, metrics and callbacks in it. Here it keeps them all, and
# its run on a `(batch, model)` mesh is proved to be that of the CPU: losses, gradient norms, evaluations and weights.
# Then it stops, and goes on from the trainer's own checkpoint.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import copy
import tempfile

import numpy as np
import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torch_shard as ts

# %% [markdown]
# ## The script
#
# A small model stands for one of `from_pretrained`. The rows are of unlike lengths, and are padded to the longest of
# their microbatch, so that two microbatches of an update have unlike numbers of tokens.

# %%
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))

texts = [torch.arange(start, start + 8 + 2 * (start % 3)) % 64 for start in torch.randint(0, 64, (320,)).tolist()]
train, held_out = texts[:288], texts[288:]


def collate(rows):
    """Pad to the longest; what is padded has no label."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = pad(rows, batch_first=True), pad(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def compute_metrics(prediction):
    counted = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float((right & counted).sum() / counted.sum())}


def arguments(rows_per_device):
    return TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=rows_per_device,
        per_device_eval_batch_size=rows_per_device,
        gradient_accumulation_steps=2,
        max_steps=12,
        learning_rate=3e-3,
        adam_epsilon=1e-4,  # below this size of gradients Adam magnifies rounding, and runs would be apart by more
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


common = {
    "data_collator": collate,
    "train_dataset": train,
    "eval_dataset": held_out,
    "compute_metrics": compute_metrics,
}

# %% [markdown]
# ## On the mesh
#
# `ts.hf.Trainer` takes a mesh, and all else as `Trainer` does. `per_device_train_batch_size` is rows per device, as
# under data parallelism: four devices along `batch` have four rows each, sixteen in all.

# %%
on_cpu = Trainer(copy.deepcopy(model), arguments(16), callbacks=[EarlyStoppingCallback(2)], **common)
on_cpu.train()

mesh = ts.make_mesh(batch=4, model=2)
on_mesh = ts.hf.Trainer(copy.deepcopy(model), arguments(4), mesh=mesh, callbacks=[EarlyStoppingCallback(2)], **common)
on_mesh.train()
print(on_mesh.train_step.report())

# %% [markdown]
# ## The proof
#
# Numbers of the log, and weights, differ by rounding alone.

# %%
NAMES = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")


def logged(trainer):
    return np.array([[entry.get(name, 0.0) for name in NAMES] for entry in trainer.state.log_history])


np.testing.assert_allclose(logged(on_mesh), logged(on_cpu), rtol=1e-5, atol=1e-7)
for name, value in on_cpu.model.state_dict().items():
    torch.testing.assert_close(on_mesh.model.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## Go on elsewhere
#
# A checkpoint is the trainer's own: `model.safetensors`, `optimizer.pt` with the moments, `scheduler.pt`. One of the
# CPU goes on on the mesh, and one of the mesh on the CPU.

# %%
resumed = Trainer(copy.deepcopy(model), arguments(16), **common)
resumed.train(resume_from_checkpoint=f"{on_mesh.args.output_dir}/checkpoint-8")
np.testing.assert_allclose(logged(resumed)[:-1], logged(on_cpu)[:-1], rtol=1e-5, atol=1e-7)

# %% [markdown]
# ## Another trainer, or a loss of your own
#
# `ts.hf.OnMesh` is mixed into any class that derives from `Trainer`.


# %%
class Smooth(ts.hf.OnMesh, Trainer):
    loss_is_scaled_for_ga = False  # a mean over a microbatch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


smooth = Smooth(copy.deepcopy(model), arguments(4), mesh=mesh, plan=ts.plans.fsdp, **common)
before = smooth.evaluate()["eval_loss"]
smooth.train()
after = smooth.evaluate()["eval_loss"]
print(f"loss {before:.3f} before, {after:.3f} after")
assert after < before - 0.5
