"""The command line from outside."""

import json
import signal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import torch_shard as ts
from tests.oracles.errors import said
from torch_shard._demo import proof as proving
from torch_shard._demo import run as running
from torch_shard._demo.files import load_weights
from torch_shard._demo.model import loss_fn
from torch_shard._demo.run import Settings, draw_validation
from torch_shard._demo.text import read_corpus
from torch_shard._fit import read_metrics
from torch_shard.cli import app


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A demo without its proof, which tests/demo/test_proof.py has."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_shard._demo.report._prove", lambda run: proving.Proof((1.0,), 0.0, 0.0, "x"))
        return CliRunner().invoke(app, ["demo", "--quick", "--steps", "5", "--seed", "3", "--out", str(out)]), out


def read_summary(out):
    return json.loads((out / "summary.json").read_text())


def test_demo_trains_proves_and_shows(finished):
    result, out = finished
    assert result.exit_code == 0, result.stderr
    for part in ("ShardingPlan on mesh (batch=4, model=2)", "CPU 0, 2, 4, 6", "5 of 5", "The proof holds", str(out)):
        assert part in result.stdout.replace("\n", "")
    assert result.stderr == ""


def test_demo_writes_metrics_of_every_step(finished):
    _, out = finished
    names = {file.name for file in out.iterdir() if not file.name.startswith("events")}
    written = {"metrics.jsonl", "model.safetensors", "report.html", "run.json", "summary.json"}
    assert names == written | {"checkpoints", "demo.json"}
    train = [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["batch"] for record in train] == [1, 2, 3, 4, 5]
    assert train[-1]["loss"] < train[0]["loss"]
    assert read_summary(out)["proof"]["holds"]


@pytest.mark.slow
def test_demo_proves_its_step(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--quick", "--steps", "5", "--seed", "3", "--out", str(tmp_path)])
    assert (result.exit_code, "The proof holds" in result.stdout) == (0, True), result.output
    assert len(read_summary(tmp_path)["proof"]["losses"]) == 10


@pytest.fixture
def quickly(monkeypatch):
    """The demo in this process, without its proof."""
    monkeypatch.setattr("torch_shard._demo.report._prove", lambda run: proving.Proof((1.0,), 0.0, 0.0, "x"))
    return ["demo", "--quick", "--steps", "5", "--seed", "3"]


@pytest.mark.slow
def test_interrupted_demo_goes_on_to_the_bit(finished, quickly, tmp_path, monkeypatch):
    batch = running.Run.batch

    def interrupting(self, step):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return batch(self, step)

    monkeypatch.setattr(running.Run, "batch", interrupting)
    stopped = CliRunner().invoke(app, [*quickly, "--out", str(tmp_path)])
    assert stopped.exit_code == 130
    assert "Stopped, and saved. The same command with --resume goes on." in stopped.stdout
    monkeypatch.setattr(running.Run, "batch", batch)
    other = CliRunner().invoke(app, [*quickly, "--seed", "4", "--resume", "--out", str(tmp_path)])
    assert "has seed 3, not 4. Resume it with the same options." in said(other)
    resumed = CliRunner().invoke(app, [*quickly, "--resume", "--out", str(tmp_path)])
    assert resumed.exit_code == 0, resumed.stdout
    found, wanted = ([r["loss"] for r in read_metrics(out / "metrics.jsonl")] for out in (tmp_path, finished[1]))
    assert found == wanted


def test_demo_touches_no_checkpoints_but_its_own(quickly, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for options in ([], ["--resume"]):
        refused = CliRunner().invoke(app, [*quickly, *options, "--out", str(tmp_path)])
        assert refused.exit_code == 2
        assert "is not of a demo. Choose another folder." in said(refused)
    assert (tmp_path / "checkpoints").exists()


def test_weights_load_into_torch_and_give_the_reported_loss(finished, corpus):
    _, out = finished
    model, records = load_weights(out / "model.safetensors"), read_metrics(out / "metrics.jsonl")
    assert model.head.weight is model.tokens.weight
    head = read_summary(out)["settings"]
    settings = Settings(steps=5, out=out, num_eval_batches=head["num_eval_batches"])
    with torch.no_grad():
        losses = [loss_fn(model, batch).item() for batch in draw_validation(corpus, settings, head["batch_size"])]
    reported = [record["loss"] for record in records if record["kind"] == "eval"][-1]
    # float32, sums over a thousand tokens in another order
    assert np.mean(losses) == pytest.approx(reported, rel=1e-5)


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).stdout.splitlines()[0] == f"torch-shard {ts.__version__}"
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    assert "demo" in listed.stdout


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("batch=8,model=2", "batch=8, model=2 needs 16 devices, but 8 are available"),
        ("batch=1,model=3", "blocks.0.q.weight (128, 128): dim 0 = 128 is not a multiple of model=3"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(mesh, message, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--mesh", mesh, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in said(result)
    assert "Traceback" not in result.stderr


def test_exit_code_says_that_the_proof_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_shard._demo.report.run_demo", lambda run, console: False)
    assert CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)]).exit_code == 1


def test_stopped_demo_says_how_to_go_on(tmp_path, monkeypatch):
    def stopped(*_):
        raise SystemExit(143)

    monkeypatch.setattr("torch_shard._demo.report.run_demo", stopped)
    found = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert found.exit_code == 143
    assert "The same command with --resume goes on" in found.output


def test_settings_that_cannot_be_read_are_said_so(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "demo.json").write_text("x")
    found = CliRunner().invoke(app, ["demo", "--quick", "--resume", "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert "cannot be read" in said(found)
