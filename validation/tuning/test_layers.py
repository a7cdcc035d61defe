"""A program of eight layers, by those of two and of three layers, under TPU's compiler."""

import math
from typing import Any

import optax
import pytest
import torch

import torch_shard as ts
from torch_shard._demo import GPT, loss_fn
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.task import Task

TPU_LAYERS, TOPOLOGY = 8, "v5e:2x2"


def test_a_whole_program_follows_from_two_and_three_layers_under_tpus_compiler():
    with torch.device("meta"):
        model = GPT(512, 128, 256, num_layers=TPU_LAYERS, num_heads=2)
    tokens = torch.empty(32, 128, dtype=torch.int64, device="meta")
    devices = list(ts.make_mesh(topology=TOPOLOGY, batch=4).devices.flat)
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16}
    task = Task(model, loss_fn, optax.adamw(1e-3), (tokens, tokens), devices=devices, options=options)
    candidate = Candidate((("batch", 2), ("model", 2)), "fsdp_tp", scan_layers=False)
    scaled, whole = task.prepare(candidate)(), task.prepare_whole(candidate)()
    # XLA schedules the whole anew, and fuses what is next to the first and the last layer in its own way
    assert scaled.cycles == pytest.approx(whole.cycles, rel=0.1)
    assert scaled.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert scaled.received == pytest.approx(whole.received, rel=0.05)
    assert scaled.memory == pytest.approx(whole.memory, rel=0.15)
    assert math.isclose(sum(scaled.exposed_by_axis.values()), scaled.exposed, rel_tol=0.01)
