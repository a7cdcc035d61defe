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
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.search import MOST
from torch_shard.cli import app

BATCH = torch.empty(32, 64, device="meta")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


DEFAULT = Candidate((("batch", 2),), "fsdp", in_loops=False)


def plain(model: nn.Module) -> dict[str, Any]:
    """What a user takes who does not tune."""
    mesh = ts.make_mesh(batch=2)
    return {"mesh": mesh, "plan": ts.plans.fsdp(model, mesh)}


def tune(model: nn.Module | None = None, batch: torch.Tensor = BATCH, **how: Any) -> ts.Tuning:
    given = {"devices": jax.devices()[:2], "minutes": 5, **how}
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
    _, metrics = step(step.init(seed=0), torch.randn(32, 64))
    assert float(metrics["loss"]) > 0
    assert step.options.clip_grad_norm == 1.0


def test_the_budgets_hold_for_the_default_which_is_always_compiled(found, model):
    (default,) = (choice for choice in found.choices if choice.candidate == DEFAULT)
    step = ts.make_train_step(model, loss_fn, optax.adam(0.1), clip_grad_norm=1.0, **plain(model))
    step.preview(BATCH).assert_at_most(**default.budgets)


def test_the_best_three_and_the_default_are_measured_and_come_first_by_the_clock(found):
    times = [choice.measured for choice in found.choices]
    measured = [seconds for seconds in times if seconds is not None]
    assert times[: len(measured)] == sorted(measured)
    assert len(measured) in (3, 4)
    assert DEFAULT in [choice.candidate for choice in found.choices if choice.measured]


def test_the_table_says_why_others_lost(found):
    text = str(found)
    for words in ("the best", "measured ms", "compiler counts no cycles", "x the best"):
        assert words in text
    assert len(found.choices) <= MOST


def test_the_same_call_later_compiles_nothing(found, model, cache, monkeypatch):
    monkeypatch.setattr(ts.TrainStep, "preview", lambda *_: pytest.fail("compiles again"))
    again = tune(model, cache=cache, clip_grad_norm=1.0, minutes=1)
    compiled = {str(choice.candidate): choice.found for choice in found.choices if choice.found}
    assert {str(choice.candidate): choice.found for choice in again.choices if choice.found} == compiled


def test_without_time_the_default_is_compiled_and_the_others_are_named(model):
    found = tune(model, minutes=1e-6)
    assert [choice.candidate for choice in found.choices] == [DEFAULT]
    assert "Not compiled for want of time: (batch=2) replicated + ZeRO-1" in str(found)


def test_a_file_gives_the_same_options(found, model, tmp_path):
    choice = ts.load_tuned(found.save(tmp_path / "a.json"), model, devices=jax.devices()[:2])
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
    choice = ts.load_tuned(other.save(tmp_path / "a.json"), model, devices=jax.devices()[:2])
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
    assert {(choice.candidate.remat, choice.options["scan_layers"]) for choice in found.choices} == {("block", "auto")}


REFUSED = {
    "unknown topology": ({"topology": "v9:2x2", "devices": None}, ValueError, "there is no topology 'v9:2x2'"),
    "chosen": (
        {"plan": None},
        TypeError,
        "tune: plan: make_train_step has no such option, or it is what is found here",
    ),
    "no such option": ({"rematerialise": True}, TypeError, "tune: rematerialise: make_train_step has no such option"),
    "minutes": ({"minutes": 0}, ValueError, "tune: minutes must be a positive number, got 0"),
    "no values": ({"measure": True}, ValueError, "give a model and a batch that have values"),
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


def test_where_nothing_is_left_each_reason_has_its_numbers(monkeypatch):
    with pytest.raises(ValueError, match=r"(?s)tune: nothing is left.*\(batch=2\) fsdp.*: 3 rows do not divide over 2"):
        tune(nn.Linear(63, 1), torch.empty(3, 63, device="meta"))
    monkeypatch.setattr("torch_shard._tune.search.memory_of", lambda _: 10_000)
    with pytest.raises(ValueError, match=r"(?s)nothing is left.*parameters and moments alone need .* more devices, or"):
        tune()


def test_where_nothing_fits_the_table_says_what_each_needs(monkeypatch):
    monkeypatch.setattr("torch_shard._tune.search.memory_of", lambda _: 400_000)
    with pytest.raises(ValueError, match=r"(?s)tune: all candidates were compiled, and none fits.*accumulate_steps"):
        tune(devices=jax.devices()[:1])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs TPU's compiler")
def test_on_tpus_the_best_is_no_slower_than_the_default(monkeypatch):
    monkeypatch.setattr("torch_shard._tune.search.MOST", 2)
    found = tune(devices=None, topology="v5e:2x2", minutes=4)
    default = next(choice for choice in found.choices if choice.candidate.recipe == "fsdp")
    assert all(choice.found for choice in found.choices)
    assert found.best.seconds <= default.seconds
    assert found.best.budgets["cycles"] > 0


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
