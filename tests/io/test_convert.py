"""torch-shard convert: from each format to each other, with the values as they were."""

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from torch_shard.cli import app


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
        self.head = nn.Linear(4, 2).bfloat16()
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.blocks(x).bfloat16()) * self.unsaved


def call(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of checkpoints, and the trained model in torch."""
    torch.manual_seed(0)
    mesh, plan = ts.make_mesh(batch=4, model=2), ts.ShardingPlan({"blocks.*.0.weight": P("model")}, default=P())
    step = ts.make_train_step(Model(), lambda m, x: m(x).square().mean(), optax.adam(0.1), mesh=mesh, plan=plan)
    state, _ = step(step.init(seed=0), torch.randn(8, 4))
    directory = tmp_path_factory.mktemp("run")
    with ts.Checkpointer(directory) as checkpointer:
        checkpointer.save(state)
    return directory, step, step.export(state)


def assert_same(found, model):
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype, name
        assert torch.equal(found[name], wanted[name]), name


def test_exported_module_has_the_dtypes_of_torch(saved):
    assert saved[2].blocks[0][1].num_batches_tracked.dtype is torch.int64
    assert saved[2].blocks[0][1].num_batches_tracked == 1


def test_round_trip_through_all_formats(saved, tmp_path):
    directory, step, model = saved
    a, b, c, d = tmp_path / "a.safetensors", tmp_path / "b.pt", tmp_path / "c", tmp_path / "d"
    for source, target, *options in ((directory, a), (a, b), (b, c, "--to", "checkpoint"), (c, d)):
        done = call(source, target, *options)
        assert done.exit_code == 0, done.stderr
        assert "written: " in done.stdout
    assert_same(load_file(a), model)
    assert_same(torch.load(b, weights_only=True), model)
    assert_same(load_file(d / "model.safetensors"), model)
    assert_same(step.export(ts.Checkpointer(c).restore(step, params_only=True)).state_dict(), model)


def test_relative_paths_of_checkpoints(saved, tmp_path, monkeypatch):
    directory, _, model = saved
    monkeypatch.chdir(directory.parent)
    done = call(directory.name, tmp_path / "a.safetensors")
    assert done.exit_code == 0, done.output
    assert_same(load_file(tmp_path / "a.safetensors"), model)


def test_folder_that_takes_no_files(saved):
    refused = call(saved[0], "/proc/a.pt")
    assert refused.exit_code == 2, refused.exception


def test_what_cannot_be_converted(saved, tmp_path):
    for arguments, message in (
        ((tmp_path / "none", tmp_path / "a.pt"), "does not exist"),
        ((saved[0], tmp_path / "a.onnx"), "must end in one of"),
        ((saved[0], tmp_path / "a", "--to", "gguf"), "must be one of safetensors, torch, checkpoint, got 'gguf'"),
        ((saved[0], saved[0], "--to", "checkpoint"), "holds checkpoints of steps [1]"),
    ):
        refused = call(*arguments)
        assert refused.exit_code == 2
        said = " ".join(refused.stderr.replace("│", " ").split())
        assert message in said
    assert not any(tmp_path.iterdir())
