"""`torch-shard demo`, from outside and by its parts."""

import json

import numpy as np
import optax
import pytest
import torch
from safetensors.torch import load_model
from typer.testing import CliRunner

import torch_shard as ts
from tests.oracles.errors import said
from torch_shard import _demo as demo
from torch_shard._fit import read_metrics
from torch_shard.cli import app

QUICK = ["demo", "--quick", "--steps", "5", "--seed", "3"]
SETTINGS = demo.Settings(5, 3, num_layers=2, num_eval_batches=4)


@pytest.fixture(scope="module")
def corpus():
    return demo.read_corpus()


def call(*options, out):
    return CliRunner().invoke(app, [*QUICK, *options, "--out", str(out)])


def test_text_is_real_and_split_by_file(corpus):
    assert len(corpus.train) > 5 * len(corpus.validation) > 0
    assert "import " in demo.decode(corpus.validation[:100_000])
    assert 3 < corpus.unigram_entropy < np.log(len(demo.VOCABULARY))
    tokens = np.array([5, 9, 9, 5], np.uint8)
    assert demo.Corpus(tokens, tokens, 1).unigram_entropy == pytest.approx(np.log(2))
    text = "def f(x):\n    if x:\n        return '~'\n"
    assert len(demo.encode(text)) < len(text)
    assert [demo.decode(demo.encode(each)) for each in (text, "é\r")] == [text, "??"]


def test_targets_are_inputs_one_position_on():
    draw = [demo.draw_batch(np.arange(50, dtype=np.uint8), batch_size=3, context=8, seed=(0, 1)) for _ in range(2)]
    (inputs, targets), (again, _) = draw
    assert inputs.shape == targets.shape == (3, 8)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, again)


def test_model_sees_no_later_token():
    model = SETTINGS.make_model().eval()
    tokens = torch.randint(len(demo.VOCABULARY), (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


def test_mesh_by_default_takes_all_devices(monkeypatch):
    assert dict(SETTINGS.choose_mesh().shape) == {"batch": 4, "model": 2}
    monkeypatch.setattr("jax.device_count", lambda: 3)
    assert dict(SETTINGS.choose_mesh().shape) == {"batch": 3, "model": 1}


@pytest.mark.parametrize(
    ("options", "found", "message"),
    [
        (["--mesh", "batch=8,model=2"], {}, "batch=8, model=2 needs 16 devices, but 8 are available"),
        (["--mesh", "batch=1,model=3"], {}, "blocks.0.q.weight (128, 128): dim 0 = 128 is not a multiple of model=3"),
        ([], {"checkpoints/1": ""}, "checkpoints is not of a demo. Choose another folder."),
        (["--resume"], {"checkpoints/1": ""}, "checkpoints is not of a demo. Choose another folder."),
        (["--overwrite"], {"checkpoints/1": ""}, "checkpoints is not of a demo. Choose another folder."),
        ([], {"checkpoints/1": "", "demo.json": "{}"}, "--resume goes on with them, --overwrite deletes them"),
        (["--resume"], {"checkpoints/1": "", "demo.json": "x"}, "demo.json cannot be read"),
        (["--resume"], {"checkpoints/1": "", "demo.json": '{"steps": 9}'}, "has steps 9, not 5, seed None, not 3"),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_all_as_it_was(options, found, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a path that is long may be folded within a word
    for name, text in found.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    refused = call(*options, out=".")
    assert refused.exit_code == 2
    assert message in said(refused)
    assert "Traceback" not in refused.stderr
    assert {name: (tmp_path / name).read_text() for name in found} == found


def test_folder_that_cannot_be_written_to_is_refused_before_any_training(tmp_path):
    (tmp_path / "file").write_text("")
    refused = call(out=tmp_path / "file")
    assert refused.exit_code == 2
    assert "cannot write to" in said(refused)


def test_status_says_how_it_ended(tmp_path, monkeypatch):
    def ends(how):
        def run_demo(*_):
            if isinstance(how, BaseException):
                raise how
            return how

        monkeypatch.setattr(demo, "run_demo", run_demo)
        return call("--overwrite", out=tmp_path)

    monkeypatch.setattr(demo, "Run", lambda *_: None)
    assert (ends(True).exit_code, ends(False).exit_code) == (0, 1)
    for how, status in ((KeyboardInterrupt(), 130), (SystemExit(143), 143)):
        stopped = ends(how)
        assert stopped.exit_code == status
        assert "Stopped, and saved. The same command with --resume goes on." in stopped.stdout


@pytest.mark.slow
def test_interrupted_demo_goes_on_and_proves_its_numbers(tmp_path):
    run = demo.Run(SETTINGS, tmp_path)
    assert not demo.begin(SETTINGS, tmp_path, resume=False)
    with ts.Checkpointer(tmp_path / demo.CHECKPOINTS) as checkpointer:
        checkpointer.save(run.step(run.state, run.batch(0))[0])
    resumed = call("--resume", out=tmp_path)
    assert resumed.exit_code == 0, resumed.output
    for part in ("ShardingPlan on mesh (batch=4, model=2)", "CPU 0,2,4,6", "5 of 5", "The proof holds", "'def '"):
        assert part in resumed.stdout
    names = {file.name for file in tmp_path.iterdir() if not file.name.startswith("events")}
    assert names == {"metrics.jsonl", "model.safetensors", "summary.json", "demo.json", "checkpoints"}
    summary, records = json.loads((tmp_path / "summary.json").read_text()), read_metrics(tmp_path / "metrics.jsonl")
    assert summary["proof"]["holds"]
    train = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(train) == 4  # after the first
    assert train[-1] < train[0]
    run, model = demo.Run(SETTINGS, tmp_path), SETTINGS.make_model().eval()
    load_model(model, tmp_path / "model.safetensors")
    with torch.no_grad():
        found = np.mean([demo.loss_fn(model, batch).item() for batch in run.validation])
    # float32, sums over a thousand tokens in another order
    assert found == pytest.approx([record["loss"] for record in records if record["kind"] == "eval"][-1], rel=1e-5)


@pytest.mark.slow
def test_proof_fails_if_the_step_leaves_out_weight_decay(tmp_path, monkeypatch):
    run = demo.Run(demo.Settings(1, mesh={"batch": 3, "model": 2}, num_layers=1), tmp_path)
    assert run.batch_size == 18  # rounded up to the mesh
    adamw = optax.adamw
    monkeypatch.setattr(optax, "adamw", lambda *args, **kwargs: adamw(*args, **kwargs | {"weight_decay": 0.0}))
    assert demo.prove(run)["parameter"].worst > demo.TOLERANCES["parameter"]
