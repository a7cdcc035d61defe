# %% [markdown]
# # A small GPT, from text to generation
#
# The whole way of a language model, small enough for two cores: text becomes tokens, a GPT in plain torch is trained on
# a mesh, by FSDP and tensor parallelism, and continues a prompt. The model knows nothing of the mesh.
#
# It simulates four devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import math

import jax

jax.config.update("jax_num_cpu_devices", 4)

from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import torch_shard as ts

torch.manual_seed(0)

# %% [markdown]
# ## Text
#
# Every Python has its own reference manual. One token per letter is enough here; for a tokenizer's tokens nothing below
# changes. Nine tenths are for training.

# %%
text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
letters = sorted(set(text))
number_of = {letter: number for number, letter in enumerate(letters)}
tokens = torch.tensor([number_of[letter] for letter in text])
CONTEXT = 64


class Windows(Dataset):
    """Stretches of text, one behind the other, with one letter more than the model sees: the last target."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index):
        return self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]


border = 9 * len(tokens) // 10
train, held_out = Windows(tokens[:border]), Windows(tokens[border:])

# %% [markdown]
# ## The model, as anyone would write it


# %%
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width=64, layers=2, heads=4):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


model = Gpt(len(letters))

# %% [markdown]
# ## A mesh, a plan, a step
#
# Two groups of rows, two parts of every layer. The recipe says for each parameter how it is split, and why; the
# schedule is torch's own.

# %%
STEPS = 120
mesh = ts.make_mesh(batch=2, model=2)
plan = ts.plans.fsdp_tp(model, mesh)
print(plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
step = ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan, clip_grad_norm=1.0)

# %% [markdown]
# ## Training
#
# `fit` shuffles the windows by its seed. (`prove_steps=1` would compare the first step with eager torch.) A model that
# only counted letters would come to their entropy.

# %%
state = ts.fit(
    step,
    None,
    train,
    batch_size=32,
    steps=STEPS,
    scheduler=schedule,
    seed=0,
    progress=False,
)
evaluate = step.evaluation()
windows = torch.stack([held_out[i] for i in range(min(len(held_out), 256))])
loss = float(evaluate(state, windows)["loss"])
shares = torch.bincount(tokens).double() / len(tokens)
entropy = float(-(shares * shares.log()).sum())
print(f"{loss:.2f} nats per letter, {math.exp(loss):.1f} letters in question; counted letters alone: {entropy:.2f}")

# %% [markdown]
# ## Generation
#
# `make_apply` compiles the forward pass of the trained state. The window has one length, so there is one program: a
# prompt that is shorter is filled up behind, where a causal model does not look. (`ts.generate` does this with a cache,
# for decoders of transformers.)

# %%
apply = ts.make_apply(model, mesh=mesh, plan=plan)


def continued(prompt, length, temperature=0.7):
    ids = [number_of[letter] for letter in prompt.encode()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        seen = ids[-CONTEXT:]
        window = torch.tensor([seen + [0] * (CONTEXT - len(seen))]).repeat(2, 1)  # a row for each group of devices
        logits = torch.from_numpy(np.array(apply(state, window)[0, len(seen) - 1]))
        ids.append(int(torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)))
    return bytes(letters[i] for i in ids).decode()


print(written := continued("The class ", 80))

# %% [markdown]
# ## Back to torch
#
# The trained weights are a torch module again, and give the same logits.

# %%
trained = step.export(state).eval()
with torch.no_grad():
    here = trained(windows[:4, :-1])
there = torch.from_numpy(np.array(apply(state, windows[:4, :-1])))
torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)  # float32, two layers
assert len(written) == 90
assert loss < 0.8 * entropy
