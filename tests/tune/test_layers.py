"""Figures of a whole model by those of a few of its layers, against those of the whole model itself."""

import dataclasses
from typing import Any

import jax
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from torch_shard._capture import Precision
from torch_shard._demo import GPT, loss_fn
from torch_shard._tune.cache import Measured, extrapolated
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.facts import alike_layers, facts_of
from torch_shard._tune.layers import find_repeats, shorten
from torch_shard._tune.task import Task

LAYERS = 4
TOKENS = torch.empty(8, 16, dtype=torch.int64, device="meta")
BATCH = (TOKENS, TOKENS)
ONE_BY_ONE = Candidate((("batch", 8),), "fsdp", scan_layers=False)


def gpt(num_layers: int = LAYERS) -> nn.Module:
    with torch.device("meta"):
        return GPT(64, 16, 32, num_layers=num_layers, num_heads=4)


def make_task(model: nn.Module, optimizer: Any = None, devices: Any = None, **options: Any) -> Task:
    found = devices or jax.devices()[:8]
    return Task(model, loss_fn, optimizer or optax.adamw(1e-3), BATCH, devices=found, options=options)


@pytest.fixture(scope="module")
def task() -> Task:
    model = gpt()
    return make_task(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_facts_by_layers_are_those_of_the_whole(task):
    model, exact = task.model, dataclasses.asdict
    whole = facts_of(model, loss_fn, BATCH, Precision(None, "params"), alike=alike_layers(model))
    found, wanted = exact(task.facts), exact(whole)
    for facts in (found, wanted):
        del facts["fingerprint"], facts["operators"]  # which counts some of what is between layers
        facts["saved"] = sorted(map(str, facts["saved"]))
    assert found == wanted


def test_a_whole_program_follows_from_two_and_three_layers(task):
    scaled, whole = task.prepare_scaled(ONE_BY_ONE)(), task.prepare_whole(ONE_BY_ONE)()
    assert (scaled.scaled, whole.scaled) == ("2 and 3 of 4", "")
    # products and collectives are the same for each layer, so nothing but XLA's choices at the seams is apart
    assert scaled.received == pytest.approx(whole.received, rel=0.02)
    assert scaled.compute == pytest.approx(whole.compute, rel=0.05)
    assert scaled.memory == pytest.approx(whole.memory, rel=0.05)
    assert set(scaled.collectives) == set(whole.collectives)


def test_a_loop_is_compiled_whole(task):
    found = task.prepare(dataclasses.replace(ONE_BY_ONE, scan_layers="auto"))()
    assert (found.scaled, found.loops) == ("", True)


def test_a_copy_with_fewer_layers_leaves_the_model_and_has_what_is_beside_them():
    class Block(nn.Module):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.lin = nn.Linear(4, width)
            self.out = nn.Linear(width, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(self.lin(x).relu())

    model = nn.Sequential(Block(8), *(Block() for _ in range(5)), Block(2))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:10], "lr": 0.1}, {"params": parameters[10:]}], lr=0.2)
    repeats = find_repeats(
        model, lambda m, x: m(x).sum(), torch.ones(8, 4), Precision(None, "params"), mesh=ts.make_mesh(batch=8)
    )
    assert repeats is not None
    assert repeats.loops == ((("1",), ("2",), ("3",), ("4",), ("5",)),)
    short = shorten(model, optimizer, repeats, 2)
    assert [name for name, _ in short.module.named_children()] == ["0", "1", "2", "3"]
    assert short.module.get_submodule("3.lin").out_features == 2
    assert (short.names["5.lin"], short.names["6.out"], short.names["0"]) == ("2.lin", "3.out", "0")
    assert len(model) == 7
    assert isinstance(short.optimizer, torch.optim.Optimizer)
    assert [(len(g["params"]), g["lr"]) for g in short.optimizer.param_groups] == [(10, 0.1), (6, 0.2)]
    left = {id(p) for p in short.module.parameters()}
    assert {id(p) for group in short.optimizer.param_groups for p in group["params"]} == left
    assert all(p.is_meta for p in short.module.parameters())


def test_layers_that_share_parameters_are_not_taken_apart():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in [*self.layers, *self.layers]:
                x = layer(x).relu()
            return x

    mesh, precision = ts.make_mesh(batch=8), Precision(None, "params")
    assert find_repeats(Shared(), lambda m, x: m(x).sum(), torch.ones(8, 4), precision, mesh=mesh) is None


def test_a_model_that_cannot_run_with_fewer_layers_is_taken_whole():
    class Counted(GPT):
        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            assert len(self.blocks) == LAYERS
            return super().forward(tokens_BT)

    with torch.device("meta"):
        model = Counted(64, 16, 32, num_layers=LAYERS, num_heads=4)
    task = make_task(model)
    assert task.repeats is None
    assert task.facts.layers == (LAYERS,)


def test_what_grows_with_each_layer_grows_on():
    short = Measured(memory=10, compute=1.0, received=4, collectives={"all-reduce": 2}, exposed_by_axis={"batch": 1.0})
    long = Measured(memory=13, compute=1.5, received=4, collectives={"all-reduce": 3}, exposed_by_axis={"model": 0.5})
    found = extrapolated(short, long, (2, 3), 10)
    assert (found.memory, found.compute, found.received, found.collectives) == (34, 5.0, 4, {"all-reduce": 10})
    assert found.exposed_by_axis == {"batch": 0.0, "model": 4.0}
    refused = extrapolated(short, Measured(refused="too large"), (2, 3), 10)
    assert not refused.fits
