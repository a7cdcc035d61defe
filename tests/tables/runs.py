"""A small run: its step, its rows, and every kind of loader that gives them."""

import itertools
import json
import random

import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torch_shard as ts
from tests.oracles.steps import anew

ROWS, FEATURES, STEPS = 44, 6, 12  # five batches of 8 rows per epoch, the rest is dropped

DATA = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))


def squares(model, batch):
    return model(batch).square().mean(), {"largest": batch.abs().max()}


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))


def make_step(*sizes):
    mesh = ts.make_mesh(batch=sizes[0], model=sizes[1])
    plan = ts.ShardingPlan({"0.weight": P("model")}, default=P())
    return ts.make_train_step(make_model(), squares, optax.adam(1e-2), mesh=mesh, plan=plan, look_again=False)


class Noisy(Dataset):
    """Augments with all three global generators."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return DATA[index] + 0.1 * (torch.rand(()) + random.random() + float(np.random.rand()))


class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(ROWS)
        return iter(DATA[order])


def loader(**options):
    return DataLoader(DATA, **{"batch_size": 8, "shuffle": True, "drop_last": True, **options})


LOADERS = {
    "shuffled": loader,
    "own generator": lambda: loader(generator=torch.Generator().manual_seed(5)),
    "augmented": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), batch_size=8, drop_last=True),
    "function": lambda: lambda position: (DATA[:8] * n for n in itertools.count(position)),
}


def losses(log):
    return [
        r["loss"] for r in map(json.loads, (log / "metrics.jsonl").read_text().splitlines()) if r["kind"] == "train"
    ]


def run(step, batches, directory, steps=STEPS, **options):
    """One process's part of a run that logs and saves; it begins with the first values, or from a checkpoint."""
    with ts.Checkpointer(directory / "checkpoints", every=3) as checkpointer:
        return ts.fit(
            anew(step, make_model()),
            None,
            batches,
            steps=steps,
            checkpointer=checkpointer,
            log=directory / "log",
            progress=False,
            **options,
        )


def values(state):
    return {name: np.asarray(value) for name, value in state.tensors.items()}
