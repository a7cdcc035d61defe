"""Programs kept on disk: another process takes them from there and computes the same bits; nothing else is touched."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from torch import nn

import torch_shard as ts
from tests.tables.cases import WHOLE, make_mesh, squared_error

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

RUN = """
import collections, json, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import optax, torch
import torch_shard as ts
from jax.sharding import PartitionSpec as P
from torch import nn

found = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: found.update([event]))
directory, width = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 4))
batch = (torch.randn(8, 8), torch.randn(8, 4))
def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
sizes = {"batch": 4, "model": 2} if sys.argv[3:] else {"batch": 1, "model": 1, "devices": jax.devices()[:1]}
options = dict(mesh=ts.make_mesh(**sizes), compile_cache=directory)
options["plan"] = ts.ShardingPlan({"0.weight": P("model"), "3.weight": P(None, "model")}, default=P())
step = ts.make_train_step(model, loss_fn, optax.adam(1e-2), **options)
state, losses = step.init(seed=0), []
for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]).hex())
losses.append(float(ts.make_eval_step(model, loss_fn, **options)(state, batch)["loss"]).hex())
print(json.dumps([losses, found]))
"""


def start(directory: Path, width: int = 16, *, on_many: bool = False, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(directory), str(width), *["many"] * on_many]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environ})


def finish(process: subprocess.Popen[str]) -> tuple[list[str], dict[str, int]]:
    """The losses, bit by bit, and the events."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    losses, events = json.loads(out.splitlines()[-1])
    return losses, events


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory that a first process has filled, and its losses."""
    directory = tmp_path_factory.mktemp("cache") / "made" / "here"
    losses, events = finish(start(directory))
    assert events.get(HIT, 0) == 0
    assert events[MISS] == 3  # the optimiser's init, the training step, the evaluation step
    return directory, losses


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_second_process_takes_every_program_and_computes_the_same_bits(filled: tuple[Path, list[str]]) -> None:
    directory, losses = filled
    before = entries(directory)
    again, events = finish(start(directory))
    assert events[HIT] == 3
    assert events.get(MISS, 0) == 0
    assert again == losses
    assert entries(directory) == before


@pytest.mark.slow
def test_processes_that_start_together_share_a_directory(tmp_path: Path, filled: tuple[Path, list[str]]) -> None:
    """One may meet an entry that the other is writing: JAX then warns and compiles."""
    filled_entries = entries(filled[0])
    running = [start(tmp_path), start(tmp_path)]
    assert [finish(process)[0] for process in running] == [filled[1]] * 2
    assert entries(tmp_path) == filled_entries


def test_another_model_is_another_entry(filled: tuple[Path, list[str]]) -> None:
    directory, losses = filled
    before = entries(directory)
    other, events = finish(start(directory, width=24))
    assert events.get(HIT, 0) == 0
    assert events[MISS] == 3
    assert other != losses
    assert len(entries(directory)) == len(before) + 3


def test_programs_of_several_simulated_devices_are_compiled_anew(tmp_path: Path) -> None:
    """Also where JAX is set to a cache: XLA:CPU would lose the order of their collectives."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    settings = {"JAX_COMPILATION_CACHE_DIR": str(theirs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    finish(start(ours, on_many=True, **settings, JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1"))
    assert not entries(ours)
    kept = {name.split("-")[0] for name in entries(theirs)}
    assert kept
    assert kept.isdisjoint({"jit_init_opt_state", "jit_train_step", "jit_evaluate"})


def make(directory: Any, **options: Any) -> Any:
    options = {"mesh": make_mesh((1, 1)), "plan": WHOLE, "compile_cache": directory, **options}
    return ts.make_train_step(nn.Linear(8, 4), squared_error, optax.sgd(0.1), **options)


BATCH = (torch.ones(8, 8), torch.ones(8, 4))


def test_an_entry_that_is_broken_off_is_compiled_anew(tmp_path: Path) -> None:
    """What a process leaves that is killed while it writes."""
    torch.manual_seed(0)
    step = make(tmp_path)
    _, wanted = step(step.init(), BATCH)
    (path,) = (p for p in tmp_path.iterdir() if "train_step" in p.name)
    path.write_bytes(path.read_bytes()[:1000])
    torch.manual_seed(0)
    step = make(tmp_path)
    state = step.init()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        _, found = step(state, BATCH)
    assert float(found["loss"]) == float(wanted["loss"])


def test_jaxs_own_settings_and_cache_are_left_alone(tmp_path: Path) -> None:
    names = [name for name in jax.config.values if "cache" in name]
    before = {name: getattr(jax.config, name) for name in names}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    jax.config.update("jax_compilation_cache_dir", str(theirs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        step = make(ours)
        state, _ = step(step.init(), BATCH)
        assert jax.config.jax_compilation_cache_dir == str(theirs)
        programs = entries(ours)
        jax.jit(lambda x: jnp.sin(x) + 17)(1.0)
        step(state, BATCH)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()
    assert {name.split("-")[0] for name in programs} == {"jit_train_step", "jit_init_opt_state"}
    assert entries(ours) == programs
    assert any("lambda" in name for name in entries(theirs))
    assert not any("train_step" in name for name in entries(theirs))


def test_without_a_directory_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    step = make(None)
    monkeypatch.setattr(jax.config, "update", lambda *args: updates.append(args))
    step(step.init(), BATCH)
    assert updates == []


def test_a_failed_compilation_puts_the_settings_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    step = make(tmp_path)
    state = step.init()
    jit, failed = jax.jit, []

    def failing_once(fn: Any, **options: Any) -> Any:
        jitted = jit(fn, **options)

        def call(*args: Any) -> Any:
            if failed:
                return jitted(*args)
            failed.append(jax.config.jax_compilation_cache_dir)
            raise RuntimeError("no")

        return call

    monkeypatch.setattr(jax, "jit", failing_once)
    with pytest.raises(RuntimeError, match="no"):
        step(state, BATCH)
    assert failed == [str(tmp_path)]
    assert jax.config.jax_compilation_cache_dir == before
    step(state, BATCH)
    assert any("train_step" in name for name in entries(tmp_path))


@pytest.mark.parametrize("make_step", [ts.make_train_step, ts.make_eval_step])
def test_a_directory_that_cannot_be_written_to(make_step: Any, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    optimizer = [optax.sgd(0.1)] if make_step is ts.make_train_step else []
    for path in (taken, taken / "below", str(taken)):
        with pytest.raises(
            ValueError, match=r"make_\w+_step: compile_cache='.*file.*' must be a directory that can be"
        ):
            make_step(
                nn.Linear(8, 4), squared_error, *optimizer, mesh=make_mesh((4, 2)), plan=WHOLE, compile_cache=path
            )
    with pytest.raises(ValueError, match="compile_cache is empty"):
        make("")
    with pytest.raises(TypeError, match="compile_cache must be a path or None, got int"):
        make(3)
