# %% [markdown]
# # Several hosts
#
# With several hosts each runs the same script, and JAX makes one program of them. This tutorial plays two hosts with
# two processes of this one, two CPU devices each, which talk to each other over the loopback. It starts them by
# itself; with real hosts a launcher does (torchrun, SLURM, mpirun, Kubernetes), and the script stays as it is.

# %%
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

import jax
from safetensors.torch import load_file

FOLDER = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## The script
#
# Three things are there for several hosts. `ts.initialize()` starts the job from what the launcher says, and does
# nothing in one process. `fit` is given the dataset itself: each host reads the rows of its own devices and no
# others, in an order that does not depend on how many hosts there are. And checkpoints are in a folder that all of
# them see.
#
# Two mistakes are built in, to be seen further down: with `MISTAKE=seed` each process first makes another model, and
# with `MISTAKE=dies` process 1 is killed, in its first life, in the middle of the run.

# %%
SCRIPT = FOLDER / "train.py"
SCRIPT.write_text('''
import os, pathlib, signal, sys
import jax, optax, torch
from torch import nn
import torch_shard as ts

FOLDER, MISTAKE = pathlib.Path(sys.argv[1]), os.environ.get("MISTAKE")


class Points(torch.utils.data.Dataset):
    """Rows that are made when they are read."""

    num_read = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.num_read += 1
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if MISTAKE == "dies" and is_first and jax.process_index() == 1 and self.num_read > 64:  # 8 batches
            os.kill(os.getpid(), signal.SIGKILL)
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row, (row.sum() > 0).long()


def loss_fn(model, batch):
    rows, labels = batch
    return nn.functional.cross_entropy(model(rows), labels)


def train(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    mesh = ts.make_mesh(batch=2, model=2)
    step = ts.make_train_step(model, loss_fn, optax.adamw(1e-2), mesh=mesh, plan=ts.plans.tp(model, mesh))
    with ts.Checkpointer(FOLDER, every=3) as checkpoints:
        state = ts.fit(step, None, Points(), batch_size=16, steps=12, checkpointer=checkpoints, progress=False)
    ts.export_safetensors(state, FOLDER / "trained.safetensors")


print(ts.initialize())
if MISTAKE == "seed":
    try:
        train(seed=jax.process_index())
    except ValueError as error:
        print(error)
train(seed=0)
''')


# %% [markdown]
# ## One process, and two
#
# One process with four devices is this one. `torchrun --nproc-per-node 2` starts two with two devices each, with the
# variables `RANK`, `WORLD_SIZE` and others that `ts.initialize()` reads. The two train what one trains: the same rows
# in the same order, up to the rounding of sums that are taken in another order.


# %%
def folder_of(name: str) -> str:
    """A folder for one run."""
    (FOLDER / name).mkdir()
    return str(FOLDER / name)


def torchrun(name: str, *, restarts: int = 0, mistake: str) -> str:
    """Run the script in two processes, and return what they wrote."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "MISTAKE": mistake}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    command = [*start, str(SCRIPT), folder_of(name)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout


jax.config.update("jax_num_cpu_devices", 4)
sys.argv[1:] = [folder_of("one")]
runpy.run_path(str(SCRIPT))
output = torchrun("two", mistake="seed")
one, two = (load_file(FOLDER / name / "trained.safetensors") for name in ("one", "two"))
assert all(abs(one[name] - two[name]).max() < 1e-5 for name in one)

# %% [markdown]
# ## A mistake is an error, on every host
#
# Before that, each of the two drew another model: the most common mistake, with which frameworks of one process for
# each device train to the end. Here all processes compare what they begin with, and say what is wrong before a step is
# taken. It is an error in all of them, so that the script could go on with the right seed.

# %%
assert "0.weight differs between process 0 and 1" in output

# %% [markdown]
# ## A host is lost
#
# Process 1 is killed while it reads its ninth batch. The other one does not wait forever in the middle of a step: it
# says who is gone and ends, if torchrun has not ended it before, which starts the job again. It goes on from the newest
# whole checkpoint, and comes to the same parameters, bit for bit.

# %%
output = torchrun("lost", restarts=1, mistake="dies")
assert output.count("process 1 of 2 (torchrun), meeting at") == 2  # it was started again
lost = load_file(FOLDER / "lost" / "trained.safetensors")

# %% [markdown]
# The guide of several hosts has launch files for torchrun, SLURM, mpirun, Kubernetes, TPU pods, SkyPilot and Ray.

# %%
assert all((lost[name] == two[name]).all() for name in two)
