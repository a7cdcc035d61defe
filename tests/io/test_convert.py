"""Weights from each format to each other, with the values as they were."""

import pathlib

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from tests.io.test_formats import WEIGHTS, equal
from tests.oracles.errors import said
from tests.oracles.steps import step_of
from torch_shard._io.convert import convert_weights
from torch_shard.cli import app


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
        self.head = nn.Linear(4, 2).bfloat16()
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))

    def forward(self, x):
        return self.head(self.blocks(x).bfloat16()) * self.unsaved


def call(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of checkpoints, and the trained model in torch."""
    torch.manual_seed(0)
    plan = ts.ShardingPlan({"blocks.*.0.weight": P("model")}, default=P())
    step = step_of(Model(), optimizer=optax.adam(0.1), plan=plan)
    state, _ = step(step.init(seed=0), torch.randn(8, 4))
    directory = tmp_path_factory.mktemp("run")
    with ts.Checkpointer(directory) as checkpointer:
        checkpointer.save(state)
    return directory, step, step.export(state)


def test_round_trip_through_all_formats(saved, tmp_path, monkeypatch):
    directory, step, model = saved
    assert model.blocks[0][1].num_batches_tracked.dtype is torch.int64
    assert model.blocks[0][1].num_batches_tracked == 1
    monkeypatch.chdir(directory.parent)
    directory = directory.name
    a, b, c, d = tmp_path / "a.safetensors", tmp_path / "b.pt", tmp_path / "c", tmp_path / "d"
    for source, target, *options in ((directory, a), (a, b), (b, c, "--to", "checkpoint"), (c, d)):
        done = call(source, target, *options)
        assert done.exit_code == 0, done.stderr
        assert "written: " in done.stdout
    again = step.export(ts.Checkpointer(c).restore(step, params_only=True))
    for found in (
        load_file(a),
        torch.load(b, weights_only=True),
        load_file(d / "model.safetensors"),
        again.state_dict(),
    ):
        assert equal(found, model.state_dict())


def test_a_directory_of_checkpoints_takes_no_others(saved):
    refused = call(saved[0], saved[0], "--to", "checkpoint")
    assert refused.exit_code == 2
    assert "holds checkpoints of steps [1]" in said(refused)


def test_there_and_back_again(tmp_path: pathlib.Path) -> None:
    weights = {**WEIGHTS, "half": torch.randn(3).bfloat16(), "flag": torch.tensor(True), "view": torch.randn(4, 6).T}
    wanted = {**weights, "tied": weights["weight"]}
    torch.save(wanted, tmp_path / "a.pt")
    assert convert_weights(tmp_path / "a.pt", tmp_path / "b.safetensors") == tmp_path / "b.safetensors"
    assert equal(load_file(tmp_path / "b.safetensors"), wanted)
    convert_weights(tmp_path / "b.safetensors", tmp_path / "c.bin")
    again = torch.load(tmp_path / "c.bin", weights_only=True)
    assert equal(again, wanted)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in again.values())  # each stands by itself
    index = convert_weights(tmp_path / "c.bin", tmp_path / "many", max_shard_bytes=100)
    assert index == tmp_path / "many" / "model.safetensors.index.json"
    convert_weights(tmp_path / "many", tmp_path / "d.pth")
    assert equal(torch.load(tmp_path / "d.pth", weights_only=True), wanted)


def test_conversions_that_are_refused(tmp_path: pathlib.Path) -> None:
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"convert: .*b.onnx must end in one of .safetensors, .bin, .pt, .pth"):
        convert_weights(tmp_path / "a.safetensors", tmp_path / "b.onnx")
    torch.save({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"holds files of both formats"):
        convert_weights(tmp_path, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"safetensors cannot hold x: torch.complex128"):
        convert_weights(tmp_path / "a.pt", tmp_path / "b.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no weights"):
        convert_weights(tmp_path / "empty", tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()
