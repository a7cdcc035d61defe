# %% [markdown]
# # Lightning's `Trainer` on a mesh: the module stays
#
# A `LightningModule` has its loss, metrics, optimizer and schedule in it, and the `Trainer` its loops, callbacks and
# checkpoints. Here they keep it all: one strategy makes the steps compiled programs on a `(batch, model)` mesh. The run
# is proved to be that of plain Lightning on the CPU, and goes on from its checkpoint there.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import torch_shard as ts

# %% [markdown]
# ## The module
#
# It logs in its steps, keeps tensors for its hooks, and steps its schedule with each update.


# %%
class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 4))
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.confidences = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.accuracy.update(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_accuracy": self.accuracy})
        self.confidences.append(logits.softmax(-1).amax(-1).mean())

    def on_validation_epoch_end(self):
        self.log("confidence", torch.stack(self.confidences).mean())
        self.confidences.clear()

    def predict_step(self, batch):
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self):
        # Below this size of gradients Adam magnifies rounding, and runs would be apart by more.
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


torch.manual_seed(1)
inputs = torch.randn(640, 16)
labels = (inputs @ torch.randn(16, 4)).argmax(-1)
train = DataLoader(TensorDataset(inputs[:512], labels[:512]), batch_size=32)
held_out = DataLoader(TensorDataset(inputs[512:], labels[512:]), batch_size=64)


def trainer(max_epochs, **options):
    return L.Trainer(
        max_epochs=max_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss", filename="best"),
            EarlyStopping("val_loss", patience=2),
        ],
        logger=False,
        enable_progress_bar=False,
        **options,
    )


# %% [markdown]
# ## On the mesh
#
# A batch has the rows of all devices. With two microbatches an update, both run with the second one.

# %%
on_cpu = trainer(4, accelerator="cpu")
on_cpu.fit(Classifier(), train, held_out)

mesh = ts.make_mesh(batch=4, model=2)
on_mesh = trainer(4, strategy=ts.lightning.OnMesh(mesh=mesh))
on_mesh.fit(Classifier(), train, held_out)
print(on_mesh.strategy.train_step.report())

# %% [markdown]
# ## The proof
#
# What was logged, and the weights, differ by rounding alone.


# %%
def metrics(run):
    return {name: float(value) for name, value in run.callback_metrics.items()}


def weights(run):
    return {name: value.cpu() for name, value in run.lightning_module.state_dict().items()}


print(metrics(on_mesh))
for name, value in metrics(on_cpu).items():
    torch.testing.assert_close(metrics(on_mesh)[name], value, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(weights(on_mesh), weights(on_cpu), rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## Go on elsewhere
#
# A checkpoint is Lightning's own, with the moments and the schedule. One of the mesh goes on on the CPU, and one of the
# CPU on the mesh.

# %%
checkpoints = {}
for name, run in (("cpu", on_cpu), ("mesh", on_mesh)):
    checkpoints[name] = f"{tempfile.mkdtemp()}/last.ckpt"
    run.save_checkpoint(checkpoints[name])

there = trainer(6, accelerator="cpu")
there.fit(Classifier(), train, held_out, ckpt_path=checkpoints["mesh"])
here = trainer(6, strategy=ts.lightning.OnMesh(mesh=mesh, plan=ts.plans.fsdp))
here.fit(Classifier(), train, held_out, ckpt_path=checkpoints["cpu"])
torch.testing.assert_close(weights(here), weights(there), rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## Predict
#
# Test and prediction are compiled programs, too, with the best weights if you like.

# %%
classes = torch.cat(here.predict(here.lightning_module, held_out, ckpt_path="best"))
accuracy = float((classes == labels[512:]).float().mean())
print(f"{accuracy:.3f} of held-out rows are right")
assert accuracy > 0.7  # a quarter by chance
