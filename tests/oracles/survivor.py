"""A training run to kill."""

import os
import signal

import jax
import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.utils.data import DataLoader

import torch_shard as ts
from torch_shard._io import checkpointer as _checkpoint

STEPS, FEATURES = 12, 6


def train(directory: str, fault: str) -> None:
    """Train to the end with a checkpoint at each step, and write the final parameters and the losses."""
    jax.config.update("jax_num_cpu_devices", 2)
    if fault in FAULTS:
        FAULTS[fault]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    step = ts.make_train_step(
        model,
        lambda model, batch: model(batch).square().mean(),
        optax.adam(1e-2),
        mesh=ts.make_mesh(batch=2),
        plan=ts.ShardingPlan({}, default=P()),
        look_again=False,
        compile_cache=os.path.join(os.path.dirname(directory), "programs"),
    )
    loader = DataLoader(torch.randn(40, FEATURES), batch_size=8, shuffle=True)
    with ts.Checkpointer(os.path.join(directory, "checkpoints"), keep=2, every=1) as checkpointer:
        with open(os.path.join(directory, "starts"), "a") as starts:
            starts.write(f"{checkpointer.steps()[-1] if checkpointer.steps() else 0}\n")
        options = {"checkpointer": checkpointer, "log": os.path.join(directory, "log"), "progress": False}
        state = ts.fit(step, None, loader, steps=STEPS, **options)
    np.savez(os.path.join(directory, "final.npz"), **{name: np.asarray(value) for name, value in state.tensors.items()})


def die_before(name: str, count: int) -> None:
    """Be killed at the `count`-th call of a function of `_checkpoint`."""
    original, calls = getattr(_checkpoint, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(_checkpoint, name, call)


FAULTS = {
    "written-not-sealed": lambda: die_before("seal", 3),
    "sealed-not-named": lambda: die_before("rename", 2),
    "named-not-tidied": lambda: die_before("sync_directory", 3),
    "while-removing": lambda: die_before("remove_tree", 2),
}
