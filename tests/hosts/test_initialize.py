"""One call that starts the processes of a job: what it does where there is one, and what it refuses."""

import logging
import sys
import time

import jax
import optax
import pytest
import torch
from jax.sharding import AxisType

import torch_shard as ts
from tests.tables.launchers import JOBSET, PLAIN, REFUSED, ROWS, TASK, TORCHRUN

STARTING = sys.modules["torch_shard._hosts.initialize"]
SEVERAL = [row for row in ROWS if row.process is not None and (row.process[1] or 1) > 1]
ONE = [row for row in ROWS if row not in SEVERAL]
MESH = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))


@pytest.fixture
def within(monkeypatch):
    """A process that has this environment, and has not called initialize."""

    def enter(env):
        monkeypatch.setattr("os.environ", dict(env))
        monkeypatch.setattr(STARTING, "_launch", None)

    return enter


def make_step(mesh):
    return ts.make_train_step(
        torch.nn.Linear(2, 2),
        lambda m, x: m(x).sum(),
        optax.sgd(1.0),
        mesh=mesh,
        plan=ts.ShardingPlan({}, default=jax.P()),
    )


@pytest.mark.parametrize("row", SEVERAL, ids=lambda row: row.name)
def test_several_processes_of_which_jax_has_one_are_refused(row, within):
    within(row.env)
    with pytest.raises(ValueError, match=rf"make_mesh: this is one of {row.process[1]} processes .*ts\.initialize\(\)"):
        ts.make_mesh(batch=2)


def test_so_they_are_with_a_mesh_of_jax(within):
    within(TORCHRUN)
    with pytest.raises(
        ValueError, match=r"make_train_step: this is one of 2 processes \(torchrun: RANK=1, WORLD_SIZE=2"
    ):
        make_step(MESH)


@pytest.mark.parametrize("row", ONE, ids=lambda row: row.name)
def test_one_process_is_let_alone(row, within):
    within(row.env)
    assert ts.make_mesh(batch=2) == MESH
    make_step(MESH)


@pytest.mark.parametrize("env", [REFUSED[0][1], REFUSED[1][1]])
def test_what_is_said_by_halves_is_no_launcher(env, within):
    within(env)
    assert ts.make_mesh(batch=2) == MESH


def test_a_run_of_its_own_may_be_asked_for(within, caplog):
    within(TASK)
    with caplog.at_level(logging.INFO):
        launch = ts.initialize(num_processes=1)
    assert launch == ts.Launch("arguments", 0, 1)
    assert "one process (arguments)" in caplog.text
    assert ts.make_mesh(batch=2) == MESH


def test_nothing_is_done_for_one_process(within):
    within({})
    assert str(ts.initialize()) == "one process"
    assert not jax.distributed.is_initialized()


def test_topologies_need_no_processes(within):
    within(TORCHRUN)
    with pytest.raises((ValueError, ModuleNotFoundError), match="topology"):
        ts.make_mesh(topology="nothing", batch=2)


def test_it_is_called_before_jax_starts(within):
    within(PLAIN)
    with pytest.raises(RuntimeError, match=r"initialize: must be called before JAX starts its devices.* Call it first"):
        ts.initialize()


def test_a_job_of_kubernetes_needs_its_package_or_an_address(within):
    within(JOBSET)
    with pytest.raises(
        ValueError, match=r"indexed job of Kubernetes \(JOB_COMPLETION_INDEX=1.*JAX_COORDINATOR_ADDRESS"
    ):
        ts.initialize()


@pytest.fixture
def started(monkeypatch):
    """What JAX is told, in place of the start."""
    told = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *given: told.append(given))
    return told


@pytest.fixture
def on_gpus():
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "cuda,cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("on_gpus")
def test_jax_is_told_what_was_found(within, started):
    within(TASK | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    launch = ts.initialize(heartbeat_timeout_seconds=30)
    assert started == [(launch.coordinator, 4, 3, (2, 3), "deactivate", 300, 30)]
    assert str(launch) == f"process 3 of 4 (SLURM), meeting at {launch.coordinator}, with GPUs 2, 3"
    within(TASK | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert ts.initialize(local_device_ids=[1]).local_device_ids == (1,)
    within(TASK | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "JAX_LOCAL_DEVICE_IDS": "3"})
    assert ts.initialize().local_device_ids is None


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("DEADLINE_EXCEEDED", r"did not meet at 10\.0\.0\.7:1234 within 7 s .*DEADLINE_EXCEEDED"),
        ("UNKNOWN: Failed to start RPC server", r"cannot listen at 10\.0\.0\.7:1234\. End what uses the port"),
    ],
)
def test_where_processes_do_not_meet_it_says_why(reason, said, within, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr("jax.distributed.initialize", fails)
    within(PLAIN)
    with pytest.raises(RuntimeError, match=said):
        ts.initialize(initialization_timeout=7)


def test_a_process_that_waits_for_others_says_so_before_jax_ends_it(within, monkeypatch, caplog):
    monkeypatch.setattr("jax.distributed.initialize", lambda *_: time.sleep(1))
    within(PLAIN)
    ts.initialize(initialization_timeout=1)
    assert caplog.messages[0].startswith("initialize: this process (")
    assert (
        "still waits for the others at 10.0.0.7:1234, and JAX ends it after 1 s. See that all have started"
        in caplog.messages[0]
    )
    caplog.clear()
    ts.initialize(initialization_timeout=10)
    assert not caplog.messages


def test_processes_that_others_have_started_are_taken_as_they_are(within, monkeypatch):
    within(TORCHRUN)
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert str(ts.initialize()) == "process 1 of 2 (jax.distributed.initialize)"
    assert ts.initialize(num_processes=2) is ts.initialize()
    with pytest.raises(ValueError, match=r"processes are started already, as process 1 of 2 .*found num_processes=4"):
        ts.initialize(num_processes=4)
