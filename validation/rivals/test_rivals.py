"""The hand-written rivals of the benchmarks train as eager torch does."""

import optax
import pytest
import torch

import torch_shard as ts
from benchmarks import cases, sides
from benchmarks.handwritten import HandwrittenStep
from benchmarks.timing import agree


@pytest.mark.parametrize("make", [cases.mlp, cases.llama, cases.gpt, cases.resnet], ids=lambda make: make.__name__)
def test_hand_written_rivals_train_as_eager_torch_does(make):
    torch.manual_seed(0)
    case = make(quick=True)
    optimizer = optax.adamw(sides.LEARNING_RATE)
    rival = HandwrittenStep(case.rival, optimizer, ts.make_mesh(batch=2), sides.start_of(case.model))
    eager = sides.eager_torch(case.model, case.loss_fn)
    agree({"eager": eager, "rival": rival}, case.batch)
