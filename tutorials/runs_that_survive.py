# %% [markdown]
# # Runs that survive: sharded initialization, saved while they train, resumed to the bit, back to torch
#
# A long run is cut off sooner or later: by a full disk, a bad batch, a machine that is taken away. Here a small
# classifier is made straight on its shards, trained by `fit`, stopped in the middle, resumed on the same mesh to the
# bit and on another mesh, and handed back to plain torch.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import itertools
import json
import pathlib
import tempfile

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_shard as ts

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Sharded initialization
#
# The model and its loss are plain torch. `materialize` runs the constructor without memory, and computes each entry
# straight on its shards: no device and no host ever holds a whole parameter that is split. The numbers depend on the
# seed and the name, not on the mesh.


# %%
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.last = nn.Linear(64, 4)
        for block in self.blocks:  # whatever the constructor does is what is computed
            nn.init.normal_(block[0].weight, std=0.02)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(-1) == y).float().mean()}


plan = ts.ShardingPlan({"blocks.*.0.weight": P("model"), "first.weight": P("model")}, default=P())


def make_step(**sizes):
    mesh = ts.make_mesh(**sizes)
    model = ts.materialize(Classifier, mesh, plan, seed=0)
    return ts.make_train_step(model, loss_fn, optax.adamw(3e-3), mesh=mesh, plan=plan)


step = make_step(batch=4, model=2)
weight = step.model.blocks[0][0].weight
print(weight.shape, weight.jax().sharding.spec, "std", round(weight.std().item(), 4))
assert weight.jax().addressable_shards[0].data.shape == (32, 64)
other = make_step(batch=2, model=4)
assert torch.equal(weight.cpu(), other.model.blocks[0][0].weight.cpu())

# %% [markdown]
# ## The loop, with an accident
#
# `fit` shows a bar, writes `metrics.jsonl` and TensorBoard's files, evaluates, and saves. Half of the checkpoint is
# written while training goes on: `save` returns when the state has been copied to the host. The data loader here breaks
# at batch 25. What was trained until then is saved before the error goes on.

# %%
torch.manual_seed(0)
x = torch.randn(640, 16)
y = (x[:, :2] > 0).long() @ torch.tensor([1, 2])  # in which quarter of the plane the first two coordinates lie
data = TensorDataset(x, y)


class Breaks(TensorDataset):
    def __getitem__(self, index):
        if next(self.reads) >= 24 * 32:
            raise OSError("the disk with the data is gone")
        return super().__getitem__(index)


def loader(dataset):
    return DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)


broken = Breaks(x, y)
broken.reads = itertools.count()
options = {"steps": 60, "eval_loader": loader(data), "eval_every": 20, "prove_steps": 1}
with ts.Checkpointer(folder / "run", keep=2, every=10) as checkpointer:
    try:
        ts.fit(step, None, loader(broken), checkpointer=checkpointer, log=folder / "log", **options)
    except OSError as error:
        print(error, *error.__notes__, sep="\n  ")
    print("checkpoints:", checkpointer.steps())
    assert checkpointer.steps() == [20, 24]

# %% [markdown]
# ## Resumed to the bit
#
# The same call goes on where the newest whole checkpoint is: parameters, moments, the key of dropout, and the place in
# the shuffled data, in the middle of an epoch. The losses are those of a run that nothing disturbed, bit for bit.

# %%
with ts.Checkpointer(folder / "run", keep=2, every=10) as checkpointer:
    state = ts.fit(step, None, loader(data), checkpointer=checkpointer, log=folder / "log", **options)
ts.fit(make_step(batch=4, model=2), None, loader(data), log=folder / "undisturbed", **options)


def losses(log):
    records = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


print(losses(folder / "log")[22:27])
assert len(losses(folder / "log")) == 60
assert losses(folder / "log") == losses(folder / "undisturbed")

# %% [markdown]
# ## Another mesh
#
# A checkpoint has the names of the model, not the shape of the machine: it restores onto any mesh and plan, layers
# stacked or not, and another optimiser takes the parameters alone (`params_only=True`). What does not fit is listed by
# name. In a shell, `torch-shard inspect FOLDER` shows what is inside.

# %%
checkpointer = ts.Checkpointer(folder / "run")
moved = checkpointer.restore(other)
evaluate, evaluate_moved = step.evaluation(), other.evaluation()
here, there = (float(e(s, (x, y))["accuracy"]) for e, s in ((evaluate, state), (evaluate_moved, moved)))
print("accuracy", here, there)
assert abs(here - there) < 0.01  # sums of float32 in another order may tip a row
assert moved.params["blocks.0.0.weight"].addressable_shards[0].data.shape == (16, 64)

# %% [markdown]
# ## A bad batch
#
# A step whose loss or gradient is not finite is not taken. `fit` raises, and says where; `on_bad_step="skip"` goes on.

# %%
bad = [(x[:32], y[:32]), (x[:32] * float("nan"), y[:32])]
try:
    ts.fit(other, moved, lambda position: bad, steps=62, progress=False)
except ts.BadStepError as error:
    print(error)
    last_good = error.state
assert int(last_good.step) == 61

# %% [markdown]
# ## Back to torch
#
# An export has torch's names and layouts. Plain torch loads it, and so does `from_pretrained`.

# %%
path = ts.export_safetensors(last_good, folder / "exported")
plain = Classifier().eval()
plain.load_state_dict(load_file(path))
accuracy = (plain(x).argmax(-1) == y).float().mean()
print(path.name, "accuracy in torch", round(float(accuracy), 3))
assert accuracy > 0.9
