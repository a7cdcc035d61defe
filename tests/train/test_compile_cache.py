"""Programs kept on disk: another process takes them from there and computes the same bits; nothing else is touched."""

import json
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
from tests.oracles.processes import Family
from tests.tables.cases import WHOLE, make_mesh, squared_error

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

RUN = """
import collections, json
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import PartitionSpec as P
from torch import nn

found = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: found.update([event]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
batch = (torch.randn(8, 8), torch.randn(8, 4))
def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
directory = sys.argv[1]
options = dict(mesh=ts.make_mesh(batch=1, model=1, devices=jax.devices()[:1]), compile_cache=directory)
options["plan"] = ts.ShardingPlan({"0.weight": P("model"), "3.weight": P(None, "model")}, default=P())
step = ts.make_train_step(model, loss_fn, optax.adam(1e-2), **options)
state, losses = step.init(seed=0), []
for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]).hex())
losses.append(float(ts.make_eval_step(model, loss_fn, **options)(state, batch)["loss"]).hex())
print(json.dumps([losses, found]))
"""


def run(directory: Path, num: int = 1) -> list[tuple[list[str], dict[str, int]]]:
    """Of so many processes that start together: the losses, bit by bit, and the events."""
    with Family(RUN, num, directory) as family:
        family.wait(list(range(num)), 300)
    assert [end.status for end in family.ends] == [0] * num, family.ends
    return [json.loads(end.output.splitlines()[-1]) for end in family.ends]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory that a first process has filled, and its losses."""
    directory = tmp_path_factory.mktemp("cache") / "made" / "here"
    ((losses, events),) = run(directory)
    assert events.get(HIT, 0) == 0
    assert events[MISS] == 3  # the optimiser's init, the training step, the evaluation step
    return directory, losses


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_second_process_takes_every_program_and_computes_the_same_bits(filled: tuple[Path, list[str]]) -> None:
    directory, losses = filled
    before = entries(directory)
    ((again, events),) = run(directory)
    assert events[HIT] == 3
    assert events.get(MISS, 0) == 0
    assert again == losses
    assert entries(directory) == before


@pytest.mark.slow
def test_processes_that_start_together_share_a_directory(tmp_path: Path, filled: tuple[Path, list[str]]) -> None:
    """One may meet an entry that the other is writing: JAX then warns and compiles."""
    filled_entries = entries(filled[0])
    assert [losses for losses, _ in run(tmp_path, 2)] == [filled[1]] * 2
    assert entries(tmp_path) == filled_entries


def make(directory: Any, *, sizes: tuple[int, int] = (1, 1), model: nn.Module | None = None) -> Any:
    options: dict[str, Any] = {"mesh": make_mesh(sizes), "plan": WHOLE, "compile_cache": directory}
    return ts.make_train_step(model or nn.Linear(8, 4), squared_error, optax.sgd(0.1), **options)


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
    before = entries(tmp_path)
    other = make(tmp_path, model=nn.Sequential(nn.Linear(8, 4), nn.Tanh()))
    other(other.init(), BATCH)
    assert [name.split("-")[0] for name in entries(tmp_path) - before] == ["jit_train_step"]  # another entry


def test_jaxs_own_settings_and_cache_are_left_alone(tmp_path: Path) -> None:
    """And programs of several simulated devices go to neither: XLA:CPU would lose the order of their collectives."""
    names = [name for name in jax.config.values if "cache" in name]
    before = {name: getattr(jax.config, name) for name in names}
    ours, theirs, none = tmp_path / "ours", tmp_path / "theirs", tmp_path / "none"
    jax.config.update("jax_compilation_cache_dir", str(theirs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        step = make(ours)
        state, _ = step(step.init(), BATCH)
        assert jax.config.jax_compilation_cache_dir == str(theirs)
        programs = entries(ours)
        jax.jit(lambda x: jnp.sin(x) + 17)(1.0)
        step(state, BATCH)
        on_many = make(none, sizes=(4, 2))
        on_many(on_many.init(), BATCH)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()
    assert {name.split("-")[0] for name in programs} == {"jit_train_step", "jit_init_opt_state"}
    assert entries(ours) == programs
    assert not entries(none)
    assert any("lambda" in name for name in entries(theirs))
    assert not any("train_step" in name or "init_opt_state" in name for name in entries(theirs))


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
