"""What arithmetic says of candidates, from no compilation: `validation/tuning` holds it against TPU's compiler."""

from typing import Any

import optax
import pytest
import torch

import torch_shard as ts
from torch_shard._demo import GPT, loss_fn
from torch_shard._tune.arithmetic import Estimate
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.products import _seen  # pyright: ignore[reportPrivateUsage]
from torch_shard._tune.task import Task

TOPOLOGY, ROWS, LENGTH = "v5e:2x4", 64, 256

CANDIDATES = {
    "replicated": Candidate((("batch", 8),), "replicated"),
    "block": Candidate((("batch", 8),), "replicated", remat="block"),
    "fsdp_tp": Candidate((("batch", 4), ("model", 2)), "fsdp_tp"),
}


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.device("meta"):
        model = GPT(1024, LENGTH, 512, num_layers=3, num_heads=4)
    tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
    mesh = ts.make_mesh(topology=TOPOLOGY, batch=8)
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "mixed_precision": "params"}
    return Task(model, loss_fn, optax.adamw(1e-3), (tokens, tokens), devices=list(mesh.devices.flat), options=options)


@pytest.fixture(scope="module")
def estimates(task: Task) -> dict[str, Estimate]:
    return {name: task.estimate(candidate) for name, candidate in CANDIDATES.items()}


def test_to_compute_layers_again_takes_longer(estimates):
    assert estimates["block"].compute > estimates["replicated"].compute


def test_the_axes_of_the_wire_are_those_of_the_mesh(estimates):
    assert set(estimates["replicated"].wire) == {"batch"}
    assert set(estimates["fsdp_tp"].wire) == {"batch", "model"}


def test_attention_counts_what_is_seen():
    assert [_seen(band, 4, 4) for band in ((-1, -1), (-1, 0), (1, 0), (0, 0))] == [1.0, 10 / 16, 7 / 16, 4 / 16]
    assert _seen((-1, 0), 2, 4) == 3 / 8  # the first query is beside the first key
