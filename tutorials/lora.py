# %% [markdown]
# # LoRA fine-tuning: from a DataLoader to `from_pretrained`
#
# A Llama with LoRA adapters of `peft`, trained on a `(batch, model)` mesh by the optimizer of torch that the script
# has, and saved as `peft` saves it. The adapters alone are trained: `peft` has taken `requires_grad` from the rest, and
# a step heeds that.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import torch_shard as ts

# %% [markdown]
# ## The script
#
# A small model stands for one of `from_pretrained`. Model, adapters, data, optimizer and schedule are as they are in
# torch.

# %%
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=96, max_position_embeddings=64)
base = LlamaForCausalLM(config)
before = {name: value.clone() for name, value in base.state_dict().items()}
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05))

texts = torch.randint(0, 8, (64, 1)) + torch.arange(32)  # counting, from different numbers on
loader = DataLoader([{"input_ids": text, "labels": text} for text in texts], batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

# %% [markdown]
# ## On the mesh
#
# `fsdp` splits every large entry over the devices of the axis `batch`, the frozen ones too.

# %%
mesh = ts.make_mesh(batch=4, model=2)
plan = ts.plans.fsdp(model, mesh)
step = ts.make_train_step(
    model, lambda model, batch: model(**batch).loss, optimizer, clip_grad_norm=1.0, mesh=mesh, plan=plan
)
evaluate = step.evaluation()
state = step.init(seed=0)
first = float(evaluate(state, next(iter(loader)))["loss"])
state = ts.fit(step, state, loader, steps=40, scheduler=scheduler, progress=False)
last = float(evaluate(state, next(iter(loader)))["loss"])
print(f"loss {first:.3f} before, {last:.3f} after; {step.report()}")

# %% [markdown]
# ## Back to transformers
#
# The model of `peft` has the trained values. `save_pretrained` writes the adapters, and `from_pretrained` reads them on
# any machine.

# %%
folder = tempfile.mkdtemp()
model.save_pretrained(folder)

fresh = LlamaForCausalLM(config)
fresh.load_state_dict(before)
again = PeftModel.from_pretrained(fresh, folder).eval()
row = texts[:1]
with torch.no_grad():
    mine = step.export(state).eval()(input_ids=row, labels=row).loss
    theirs = again(input_ids=row, labels=row).loss
kept = all(torch.equal(value.cpu(), before[name]) for name, value in base.state_dict().items() if name in before)
assert torch.equal(mine, theirs)
assert kept
assert last < 0.8 * first
