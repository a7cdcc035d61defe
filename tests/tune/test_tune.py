"""Tuning as a whole on eight CPU devices: what is found, said, written, read and refused."""

import importlib.util
import json
from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from tests.oracles.errors import said
from torch_shard._tune.task import Task
from torch_shard.cli import app

BATCH = torch.empty(32, 64, device="meta")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def tune(model: nn.Module | None = None, batch: torch.Tensor = BATCH, **how: Any) -> ts.Tuning:
    given = {"devices": jax.devices()[:4], "minutes": 5, **how}
    return ts.tune(model or build(), loss_fn, optax.adam(0.1), batch, **given)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def found(model, cache) -> ts.Tuning:
    return tune(model, torch.randn(32, 64), cache=cache, measure=True, clip_grad_norm=1.0)


def test_the_best_is_a_step_that_trains(found, model):
    step = ts.make_train_step(model, loss_fn, optax.adam(0.1), **found.best.options)
    batch = torch.randn(32, 64)
    state = step.init(seed=0)
    step.prove(state, batch).raise_if_different()
    _, metrics = step(state, batch)
    assert float(metrics["loss"]) > 0
    assert step.options.clip_grad_norm == 1.0


def test_the_budgets_hold_for_the_best(found, model):
    step = ts.make_train_step(model, loss_fn, optax.adam(0.1), **found.best.options)
    step.preview(BATCH).assert_at_most(**found.best.budgets)


def test_the_best_three_are_measured_and_come_first_by_the_clock(found):
    times = [choice.measured for choice in found.choices]
    measured = [seconds for seconds in times if seconds is not None]
    assert times[: len(measured)] == sorted(measured)
    assert len(measured) == min(3, len(times))


def test_the_table_says_why_the_others_lost(found):
    text = str(found)
    assert "the best" in text
    assert "measured ms" in text
    assert "rows do not divide over" in text
    assert "compiler counts no cycles" in text
    assert all(pruned.why for pruned in found.pruned)


def test_the_same_call_later_compiles_nothing(found, model, cache, monkeypatch):
    monkeypatch.setattr(Task, "prepare", None)
    again = tune(model, cache=cache, clip_grad_norm=1.0, minutes=1)
    known = {choice.candidate for choice in found.choices}
    assert {choice.candidate for choice in again.choices} == known


def test_a_file_gives_the_same_options(found, model, tmp_path):
    choice = ts.load_tuned(found.save(tmp_path / "a.json"), model, devices=jax.devices()[:4])
    best = found.best.options
    assert choice.options["plan"] == best["plan"]
    assert choice.options["mesh"] == best["mesh"]
    assert {k: v for k, v in choice.options.items() if k not in ("mesh", "plan", "optimizer_plan")} == {
        k: v for k, v in best.items() if k not in ("mesh", "plan", "optimizer_plan")
    }
    assert choice.budgets == found.best.budgets


def test_options_of_all_kinds_are_written_and_read(found, model, tmp_path):
    fixed = {"compute_dtype": torch.bfloat16, "batch_spec": {"x.**": P(("a", "b"), None)}, "watch": ["0"], "ema": None}
    other = type(found)(**{**vars(found), "fixed": fixed})
    choice = ts.load_tuned(other.save(tmp_path / "a.json"), model, devices=jax.devices()[:4])
    assert {name: choice.options[name] for name in fixed} == fixed


def test_a_file_of_another_model_is_refused(found, tmp_path):
    with pytest.raises(ValueError, match=r"load_tuned: .*other names, shapes or dtypes than Linear has"):
        ts.load_tuned(found.save(tmp_path / "a.json"), nn.Linear(2, 2))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"axes": {"batch": 4}}'])
def test_a_file_that_is_damaged_is_refused(model, tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"load_tuned: .*is not what Tuning.save wrote, or is damaged"):
        ts.load_tuned(tmp_path / "a.json", model)


def test_remat_that_was_given_is_no_choice():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(x).relu()

    deep = nn.Sequential(*(Layer() for _ in range(3)))
    found = tune(deep, remat="block", scan_layers="auto", devices=jax.devices()[:1])
    assert {choice.candidate.remat for choice in found.choices} == {"block"}


def test_batch_norm_takes_no_microbatches():
    with_norm = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    found = tune(with_norm, devices=jax.devices()[:1])
    assert "microbatches would change its statistics" in str(found)
    assert all(choice.candidate.accumulate_steps == 1 for choice in found.choices)


REFUSED = {
    "unknown topology": ({"topology": "v9:2x2", "devices": None}, ValueError, "there is no topology 'v9:2x2'"),
    "chosen": ({"plan": None}, TypeError, "tune: plan is what it finds"),
    "no such option": ({"rematerialise": True}, TypeError, "make_train_step has no option rematerialise"),
    "minutes": ({"minutes": 0}, ValueError, "tune: minutes must be a positive number, got 0"),
    "too few minutes": ({"minutes": 1e-6}, ValueError, "tune: minutes=1e-06 are too few"),
    "no values": ({"measure": True}, ValueError, "give a batch that has values, not its shapes"),
    "measured nowhere": ({"measure": True, "topology": "v5e:2x2"}, ValueError, "nothing can run on topology='v5e:2x2'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said_at_once(name):
    how, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        tune(**how)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="the compiler is there")
def test_gpus_need_their_compiler_which_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"topology='h100:8' needs jax_cuda12_plugin.*torch_shard\[cuda\]"):
        tune(topology="h100:8", devices=None)


def test_a_batch_that_divides_over_no_mesh_is_refused():
    with pytest.raises(
        ValueError, match=r"tune: the batch divides over no mesh: its leaves have 3 rows, .* over 2, 4,"
    ):
        tune(nn.Linear(63, 1), torch.empty(3, 63, device="meta"))


def test_a_model_that_fits_nowhere_is_refused_with_its_largest_part_and_what_would_fit(monkeypatch):
    monkeypatch.setattr("torch_shard._tune.task.memory_of", lambda _: 10_000)
    with pytest.raises(ValueError, match=r"tune: the model fits nowhere.*About \d+ such devices would hold it"):
        tune()


FILE = """
import optax, torch
model = torch.nn.Linear(64, 32)
def loss_fn(model, batch):
    return model(batch).square().mean()
optimizer, batch = optax.sgd(0.1), torch.empty(8, 64, device="meta")
options = {"clip_grad_norm": 1.0}
"""


def test_the_command_shows_the_table_and_writes_the_best(tmp_path):
    (tmp_path / "train.py").write_text(FILE)
    ran = CliRunner().invoke(app, ["tune", str(tmp_path / "train.py"), "--save", str(tmp_path / "plan.json")])
    assert ran.exit_code == 0, ran.output
    assert "the best" in ran.output
    assert json.loads((tmp_path / "plan.json").read_text())["fixed"] == {"clip_grad_norm": 1.0}


def test_the_command_says_what_a_file_lacks(tmp_path):
    (tmp_path / "train.py").write_text("model = 1")
    ran = CliRunner().invoke(app, ["tune", str(tmp_path / "train.py")])
    assert ran.exit_code == 2
    assert "defines no loss_fn, optimizer, batch" in said(ran)
