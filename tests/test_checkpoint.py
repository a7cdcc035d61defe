"""Checkpoints: whole or not at all, under the model's names, back to the bit, onto any mesh."""

import json
import logging
import math
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from tests.processes import run_processes
from torch_shard._io import checkpointer as _checkpoint
from torch_shard._io.inventory import find_checkpoint
from torch_shard.cli import app

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.down(self.drop(self.up(x).tanh()))


class Model(nn.Module):
    """Repeated layers, dropout, a tie, a frozen layer, buffers of both kinds."""

    def __init__(self, num_layers=4, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(WIDTH, width, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.tied.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.tied(self.norm(x)).relu()) * self.scale


PLAN = ts.ShardingPlan(
    {"blocks.*.up.weight": P("model"), "blocks.*.down.weight": P(None, "model"), "tied.weight": P("model")}, default=P()
)
OTHER_PLAN = ts.ShardingPlan({"blocks.*.up.*": P("batch"), "blocks.1.down.weight": P("model")}, default=P())


def squares(model, batch):
    return model(batch).square().mean()


def make_step(*, model=None, mesh=(4, 2), plan=PLAN, optimizer=None, **options):
    torch.manual_seed(0)
    mesh = ts.make_mesh(batch=mesh[0], model=mesh[1])
    return ts.make_train_step(
        model or Model(), squares, optimizer or optax.adamw(1e-2), mesh=mesh, plan=plan, **options
    )


def batch(number):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def train(step, state, numbers):
    losses = []
    for number in numbers:
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def by_name(state):
    """Every value of a state on the host, by the model's names, however it is stored."""
    values = {name: np.asarray(array) for name, array in state.tensors.items()}
    moments = state.opt_state[0]
    values |= {f"{kind} {name}": np.asarray(m) for kind in ("mu", "nu") for name, m in getattr(moments, kind).items()}
    values |= {"count": np.asarray(moments.count), "step": np.asarray(state.step)}
    return values | {"key": np.asarray(jax.random.key_data(state.key)), "batches": np.asarray(state.num_batches)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.fixture(scope="module")
def step():
    return make_step()


@pytest.fixture(scope="module")
def saved(step, tmp_path_factory):
    """A directory with the checkpoints of steps 2, 3 and 4, the state of step 4, and the losses of the steps after."""
    directory = tmp_path_factory.mktemp("checkpoints") / "run"
    state = step.init(seed=3)
    with ts.Checkpointer(directory) as checkpointer:
        for stop in (2, 3, 4):
            state, _ = train(step, state, range(int(state.step), stop))
            assert checkpointer.save(state, metrics={"loss": stop / 2})
    values = by_name(state)
    return directory, values, train(step, state, range(4, 7))[1]


@pytest.fixture
def copied(saved, tmp_path):
    """The same directory, to damage."""
    return shutil.copytree(saved[0], tmp_path / "run")


def test_resumes_to_the_bit(saved, step):
    directory, values, losses = saved
    state = ts.Checkpointer(directory).restore(step)
    assert_same(by_name(state), values)
    assert state.unsaved == ("scale",)
    assert jax.tree.map(lambda array: array.sharding, state) == step.shardings
    assert train(step, state, range(4, 7))[1] == losses


def test_save_leaves_the_state_to_be_donated(step, tmp_path):
    """What is written is the state at the call of `save`, though later steps reuse its memory while it is written."""
    state = step.init(seed=0)
    with ts.Checkpointer(tmp_path / "run", keep=None) as checkpointer:
        wanted = {}
        for number in range(6):
            state, _ = train(step, state, [number])
            wanted[number + 1] = by_name(state)
            checkpointer.save(state)
        checkpointer.wait()
        for number, values in wanted.items():
            assert_same(by_name(checkpointer.restore(step, step=number)), values)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mesh": (2, 4)}, marks=pytest.mark.slow),
        {"mesh": (1, 2)},
        pytest.param({"mesh": (8, 1)}, marks=pytest.mark.slow),
        pytest.param({"plan": OTHER_PLAN}, marks=pytest.mark.slow),
        {"scan_layers": False},
        {"scan_layers": False, "plan": OTHER_PLAN, "mesh": (2, 2)},
    ],
    ids=str,
)
def test_restores_onto_another_mesh_and_plan(saved, options):
    other = make_step(**options)
    state = ts.Checkpointer(saved[0]).restore(other)
    assert_same(by_name(state), saved[1])
    assert jax.tree.map(lambda array: array.sharding, state) == other.shardings
    # float32 sums in another order, after steps of Adam that divide by the size of small gradients
    np.testing.assert_allclose(train(other, state, range(4, 7))[1], saved[2], rtol=1e-3)


def test_unrolled_layers_restore_into_a_loop(tmp_path, step):
    unrolled = make_step(scan_layers=False)
    state, _ = train(unrolled, unrolled.init(seed=0), range(2))
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        restored = checkpointer.restore(step)
    assert_same(by_name(restored), by_name(state))
    assert jax.tree.structure(restored) == jax.tree.structure(step.shardings)


def test_restores_into_a_model_without_values(saved):
    with torch.device("meta"):
        model = Model()
    state = ts.Checkpointer(saved[0]).restore(make_step(model=model))
    assert_same(by_name(state), saved[1])


def test_another_optimizer_takes_the_parameters_alone(saved):
    other = make_step(optimizer=optax.sgd(0.1, momentum=0.9))
    checkpointer = ts.Checkpointer(saved[0])
    with pytest.raises(ValueError, match="does not fit the model and the optimizer") as refused:
        checkpointer.restore(other)
    message = str(refused.value)
    assert "opt_state[0].trace of blocks.3.up.bias: missing in the checkpoint" in message
    assert "opt_state[0].mu of blocks.0.up.weight: in the checkpoint, not in the state to fill" in message
    assert "params_only=True" in message
    state = checkpointer.restore(other, params_only=True, seed=1)
    for name, value in state.tensors.items():
        np.testing.assert_array_equal(value, saved[1][name], err_msg=name)
    assert (int(state.step), int(state.num_batches)) == (0, 0)
    fresh = other.init(seed=1)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(fresh.key))


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (lambda: Model(num_layers=5), ["blocks.4.up.weight: missing in the checkpoint"]),
        (lambda: Model(num_layers=3), ["blocks.3.down.bias: in the checkpoint, not in the state to fill"]),
        (lambda: Model().double(), ["first.weight", "need 64 bits", "jax_enable_x64"]),
        (lambda: Model().bfloat16(), ["norm.running_mean: float32 (8,) in the checkpoint, must be bfloat16 (8,)"]),
        (lambda: nn.Linear(WIDTH, 3), ["weight: missing in the checkpoint", "first.weight: in the checkpoint"]),
    ],
)
def test_checkpoint_of_another_model_is_refused(saved, model, wanted):
    plan = ts.ShardingPlan({}, default=P())
    with pytest.raises((ValueError, TypeError)) as refused:
        ts.Checkpointer(saved[0]).restore(make_step(model=model(), plan=plan))
    for part in wanted:
        assert part in str(refused.value)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_a_bit, "its checksum differs, so some of its bits have changed"),
        (truncate, "bytes, must have"),
        (lambda file: file.unlink(), "missing"),
    ],
    ids=["bit flipped", "truncated", "missing"],
)
def test_damaged_checkpoint_is_passed_over(copied, step, damage, said, caplog):
    shards = [file for file in (copied / "step_00000004").rglob("*") if file.is_file() and file.parent.name == "d"]
    damage(max(shards, key=lambda file: file.stat().st_size))
    with ts.Checkpointer(copied, keep=2) as checkpointer:
        with caplog.at_level(logging.WARNING):
            state = checkpointer.restore(step)
        assert int(state.step) == 3
        (warning,) = (record.getMessage() for record in caplog.records if "damaged" in record.getMessage())
        assert "step_00000004 is damaged" in warning
        assert said in warning
        with pytest.raises(ValueError, match="step_00000004 is damaged"):
            checkpointer.restore(step, step=4)
        # Training goes on, comes to step 4 again, and what replaces it is whole.
        state, _ = train(step, state, [3])
        assert checkpointer.save(state)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
        assert int(checkpointer.restore(step, step=4).step) == 4


def test_every_file_counts(copied, step):
    """Whichever file is damaged, it is found."""
    checkpoint = copied / "step_00000004"
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        kept = file.read_bytes()
        file.write_bytes(kept[:-1])
        with pytest.raises(ValueError, match="is damaged"):
            ts.Checkpointer(copied).restore(step, step=4)
        file.write_bytes(kept)


def test_no_whole_checkpoint(tmp_path, copied, step):
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint in .*: there are none"):
        ts.Checkpointer(tmp_path / "nothing").restore(step)
    assert not (tmp_path / "nothing").exists()
    for path in copied.glob("step_*"):
        (path / "checksums.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint in .*: there are those of steps \[2, 3, 4\]"):
        ts.Checkpointer(copied).restore(step)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 9"):
        ts.Checkpointer(copied).restore(step, step=9)


def test_keeps_the_newest(saved, step, tmp_path):
    assert ts.Checkpointer(saved[0]).steps() == [2, 3, 4]
    state = ts.Checkpointer(saved[0]).restore(step, step=2)
    with ts.Checkpointer(tmp_path, keep=1, asynchronous=False) as checkpointer:
        assert checkpointer.save(state)
        assert not checkpointer.save(state)
        checkpointer.save(train(step, state, [2])[0])
        assert checkpointer.steps() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".unfinished", "step_00000003"]
    assert not list((tmp_path / ".unfinished").iterdir())


def test_retention_never_counts_a_damaged_one(copied, step):
    flip_a_bit(copied / "step_00000004" / "state.json")
    with ts.Checkpointer(copied, keep=1) as checkpointer:
        state = checkpointer.restore(step)
        assert int(state.step) == 3
        shutil.rmtree(copied / "step_00000003")
        checkpointer.save(state)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]  # the damaged one of step 4 does not push out the whole one of step 3


def test_one_directory_has_one_writer(tmp_path, step):
    state = step.init(seed=0)
    with ts.Checkpointer(tmp_path) as first:
        first.save(state)
        second = ts.Checkpointer(tmp_path)
        with pytest.raises(BlockingIOError, match="another process or Checkpointer is saving to"):
            second.save(train(step, state, [0])[0])
        first.wait()
        assert second.steps() == [0]
    assert int(second.restore(step).step) == 0


def test_another_process_that_writes_is_refused(tmp_path, step):
    """As a kill leaves no lock behind, the directory is free again when that process has ended."""
    program = """
import sys, torch_shard as ts
checkpointer = ts.Checkpointer(sys.argv[1])
checkpointer.claim()
sys.stdout.write("claimed\\n")
sys.stdout.flush()
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], text=True, **pipes) as other:
        assert other.stdout.readline() == "claimed\n"
        with ts.Checkpointer(tmp_path) as checkpointer:
            with pytest.raises(BlockingIOError, match="Give each run a directory of its own"):
                checkpointer.save(step.init(seed=0))
            other.kill()
            other.wait()
            assert checkpointer.save(step.init(seed=0))


def test_failed_save_leaves_the_others_and_is_told(copied, step, monkeypatch):
    state = ts.Checkpointer(copied).restore(step)

    def fail(directory):
        raise OSError(28, "No space left on device")

    with ts.Checkpointer(copied) as checkpointer:
        state, _ = train(step, state, [4])
        monkeypatch.setattr("torch_shard._io.checkpointer.seal", fail)
        checkpointer.save(state)
        with pytest.raises(RuntimeError, match=r"could not be written to .*No space left on device.*that of step 4\."):
            checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
        monkeypatch.undo()
        assert checkpointer.save(state)
    assert ts.Checkpointer(copied).steps() == [3, 4, 5]


def words(tree):
    """The arrays of a pytree; of random keys, their words."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


def large(params):
    return {name: "large" if value.ndim > 1 else "small" for name, value in params.items()}


def large_only(params):
    return {name: value.ndim > 1 for name, value in params.items()}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.multi_transform({"large": optax.adam(1e-2), "small": optax.sgd(0.1, momentum=0.9)}, large),
        # lists by name, no value at all for some names, and a random key
        lambda: optax.chain(optax.sm3(1e-2), optax.masked(optax.noisy_sgd(1e-2, key=0), large_only)),
    ],
    ids=["parts", "lists, keys"],
)
def test_states_of_all_kinds_of_optimizers_resume_to_the_bit(optimizer, tmp_path):
    """Not only arrays stand under the names: masked parts have none there, some optimisers several."""
    first, second = make_step(optimizer=optimizer()), make_step(optimizer=optimizer(), scan_layers=False)
    state, _ = train(first, first.init(seed=0), range(2))
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        unrolled = checkpointer.restore(second)
        restored = checkpointer.restore(first)
    jax.tree.map(np.testing.assert_array_equal, words(restored.opt_state), words(state.opt_state))
    assert jax.tree.structure(unrolled) == jax.tree.structure(second.shardings)
    assert train(first, restored, range(2, 4))[1] == train(first, state, range(2, 4))[1]


def test_metadata_names_every_entry(saved):
    head = json.loads((saved[0] / "step_00000004" / "state.json").read_text())
    assert head["metrics"] == ts.Checkpointer(saved[0]).metrics(4) == {"loss": 2.0}
    with pytest.raises(ValueError, match="step_00000009 is not a checkpoint"):
        ts.Checkpointer(saved[0]).metrics(9)
    names = {name for stored in head["stored"] for name in stored["names"] if stored["where"] == "tensors"}
    assert {"blocks.0.up.weight", "blocks.3.up.weight", "norm.running_mean", "scale", "first.weight"} <= names


def test_inspect_shows_what_is_inside(copied):
    shown = CliRunner().invoke(app, ["inspect", str(copied), "--verify"])
    assert shown.exit_code == 0
    for line in (
        "step_00000004: step 4, 4 batches seen",
        "loss 2",
        "on mesh (batch=4, model=2)",
        "whole: every file has its checksum",
    ):
        assert line in shown.stdout
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")]
        for line in shown.stdout.splitlines()
        if "│" in line
    }
    assert rows["blocks.2.down.weight"][2:8] == [
        "params",
        "(8, 16)",
        "float32",
        "P(None, 'model')",
        "512 bytes",
        "row 2 of 4",
    ]
    assert rows["scale"][2] == "buffers, not in state_dict"
    assert rows["opt_state[0].mu"][2] == "21"
    flip_a_bit(copied / "step_00000004" / "checksums.json")
    damaged = CliRunner().invoke(app, ["inspect", str(copied / "step_00000004"), "--verify"])
    assert damaged.exit_code == 1
    assert "damaged: " in damaged.stdout


def test_inspect_of_no_checkpoint(tmp_path):
    refused = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert refused.exit_code == 2
    assert "is not a checkpoint and holds none" in " ".join(refused.stderr.replace("│", " ").split())


def test_a_checkpoint_is_not_a_directory_of_them_nor_the_run_above(copied):
    with pytest.raises(ValueError, match=rf"step_00000004 is a checkpoint; .* {copied}, and `restore"):
        ts.Checkpointer(copied / "step_00000004")
    with pytest.raises(FileNotFoundError, match=f"Below it are some: {copied}"):
        find_checkpoint(copied.parent)


def test_options_are_checked():
    with pytest.raises(ValueError, match="keep must be a positive integer, got 0"):
        ts.Checkpointer("x", keep=0)
    with pytest.raises(ValueError, match="every must be a positive integer"):
        ts.Checkpointer("x", every=None)  # pyright: ignore
    with pytest.raises(TypeError, match="directory must be a path, got int"):
        ts.Checkpointer(3)  # pyright: ignore


def test_arguments_of_the_wrong_kind(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"directory must be a directory, but .* is a file"):
        ts.Checkpointer(tmp_path / "file")
    with pytest.raises(TypeError, match=r"Checkpointer.save: state must be a TrainState, got tuple"):
        ts.Checkpointer(tmp_path).save((1, 2))  # pyright: ignore
    with pytest.raises(TypeError, match=r"Checkpointer.restore: train_step must be a TrainStep, got Linear"):
        ts.Checkpointer(tmp_path).restore(nn.Linear(2, 2))  # pyright: ignore


def test_guarded_step_keeps_the_state(step):
    state, _ = train(step, step.init(seed=0), [0])
    before = by_name(state)
    state, metrics = step(state, batch(1) * math.nan, max_grad_norm=math.inf)
    assert bool(metrics["guard"].skipped)
    assert metrics["guard"].non_finite()[0] == "blocks.0.up.weight"
    after = by_name(state)
    assert after.pop("batches") == before.pop("batches") + 1
    assert_same(after, before)


def test_guarded_step_keeps_the_state_where_squares_overflow():
    """A gradient of 1e24 is finite; its square, which Adam keeps, is not, and would stop the parameter for good."""
    step = make_step(model=nn.Linear(WIDTH, WIDTH), plan=ts.ShardingPlan({}, default=P()), optimizer=optax.adam(1e-2))
    state, metrics = step(step.init(seed=0), batch(0) * 1e12, max_grad_norm=math.inf)
    assert metrics["guard"].non_finite() == []
    assert bool(metrics["guard"].skipped)
    assert all(np.isfinite(value).all() for value in by_name(state).values())


def test_guarded_step_keeps_buffers_finite():
    """Batch norm divides an absurd batch away, so that the loss is fine; the running variance would not be."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model.register_buffer("mask", torch.full((2,), -math.inf))  # is not finite, and may be so
    step = make_step(model=model, plan=ts.ShardingPlan({}, default=P()))
    state, metrics = step(step.init(seed=0), batch(0), max_grad_norm=math.inf)
    assert not bool(metrics["guard"].skipped)
    state, metrics = step(state, batch(1) * 1e25, max_grad_norm=math.inf)
    assert math.isfinite(metrics["loss"])
    assert metrics["guard"].lost_buffers() == ["0.running_var"]
    assert bool(metrics["guard"].skipped)
    assert np.isfinite(state.buffers["0.running_var"]).all()


def test_norm_of_half_precision_loses_no_terms():
    """Added up in bfloat16, the squares of 400 small gradients would stop at 256 times the size of one."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(400))

        def forward(self, x):
            return x @ torch.stack(list(self.parts)).T

    model = Many().bfloat16()
    step = make_step(model=model, mesh=(1, 1), plan=ts.ShardingPlan({}, default=P()), optimizer=optax.sgd(0.0))
    _, metrics = step(step.init(seed=0), batch(0).bfloat16())
    squares(model, batch(0).bfloat16()).backward()
    wanted = torch.stack([part.grad.float().square().sum() for part in model.parts]).sum().sqrt()
    # each gradient is rounded to 8 bits
    np.testing.assert_allclose(float(metrics["grad_norm"]), float(wanted), rtol=2**-8)


@pytest.mark.parametrize("moment", ["torch_shard._io.checkpointer.find_damage", "torch_shard._checkpoint.read_head"])
def test_checkpoint_that_its_writer_removes_is_no_trouble_to_a_reader(moment, copied, step, monkeypatch, caplog):
    """While it is read, another process saves a newer one and removes it."""
    name = moment.rpartition(".")[2]
    original, calls = getattr(_checkpoint, name), []

    def meanwhile(path, **options):
        calls.append(path.name)
        if len(calls) == 1:
            path.rename(copied / "step_00000005")
        return original(path, **options)

    monkeypatch.setattr(moment, meanwhile)
    assert int(ts.Checkpointer(copied).restore(step).step) == 4  # what it holds
    assert calls == ["step_00000004", "step_00000005"]
    assert "damaged" not in caplog.text


def test_donated_state_is_not_saved(step, tmp_path):
    state = step.init(seed=0)
    step(state, batch(0))
    with ts.Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="was donated to a step"):
        checkpointer.save(state)


def test_one_checkpointer_serves_several_threads(step, tmp_path):
    state = step.init(seed=0)
    with ts.Checkpointer(tmp_path) as checkpointer:
        thread = threading.Thread(target=checkpointer.claim)
        thread.start()
        thread.join()
        assert checkpointer.save(state)
    ts.Checkpointer(tmp_path).claim()


def test_processes_save_together_and_one_restores_it(tmp_path, step):
    """Two processes with two devices each write one checkpoint; each finds a damaged one, and both take the older."""
    run_processes(
        f"""
        import numpy as np
        from pathlib import Path
        from tests import test_checkpoint as t

        directory = Path({str(tmp_path)!r})
        step = t.make_step(mesh=(2, 2))
        state, _ = t.train(step, step.init(seed=3), range(2))
        with ts.Checkpointer(directory / "run") as checkpointer:
            assert checkpointer.save(state)
            state, _ = t.train(step, state, range(2, 3))
            assert checkpointer.save(state)
            checkpointer.wait()
            assert checkpointer.steps() == [2, 3]
            if rank == 0:
                files = [file for file in checkpointer.path(3).rglob("*") if file.is_file()]
                t.flip_a_bit(max(files, key=lambda file: file.stat().st_size))
            jax.experimental.multihost_utils.sync_global_devices("damaged")
            restored = checkpointer.restore(step)
            assert int(restored.step) == 2
            _, losses = t.train(step, restored, range(2, 5))
        (directory / f"losses{{rank}}").write_text(repr(losses))
        """,
        2,
    )
    state = ts.Checkpointer(tmp_path / "run").restore(step)
    assert int(state.step) == 2
    first, second = ((tmp_path / f"losses{rank}").read_text() for rank in (0, 1))
    assert first == second
    # float32 sums in another order
    np.testing.assert_allclose(train(step, state, range(2, 5))[1], eval(first), rtol=1e-3)
