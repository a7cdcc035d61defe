"""Launchers for real: they start processes on this host, which train as one job with the numbers of one process."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import optax
import pytest
import torch

import torch_shard as ts
from tests.oracles.processes import Family

PLAN = "ts.ShardingPlan({}, default=jax.P())"
STEP = f"""
def make(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    loss_fn = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    return ts.make_train_step(model, loss_fn, optax.adam(0.1), mesh=mesh, plan={PLAN})

def train(mesh):
    step = make(mesh)
    state, losses = step.init(seed=0), []
    for seed in range(3):
        numbers = torch.Generator().manual_seed(seed)
        state, metrics = step(state, (torch.randn(8, 4, generator=numbers), torch.randn(8, 1, generator=numbers)))
        losses.append(float(metrics["loss"]))
    return losses
"""
SCRIPT = f"""
import json, os, pathlib, sys
import jax, optax, torch
import torch_shard as ts
{STEP}
launch = ts.initialize()
life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
fails = life == 0 and sys.argv[2:] == ["fails"]
losses = None if fails else train(ts.make_mesh(batch=2))
found = [str(launch), launch.coordinator, launch.process_id, jax.process_count(), jax.local_device_count(), losses]
(pathlib.Path(sys.argv[1]) / f"{{life}}-{{launch.process_id}}.json").write_text(json.dumps(found))
if fails and launch.process_id == 1:
    raise RuntimeError("in the first life")
"""


@pytest.fixture
def launch(tmp_path):
    """Start the script by a launcher; what each process has found, by life and process."""

    def launch(*command):
        (tmp_path / "train.py").write_text(SCRIPT)
        env = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        ended = subprocess.run(
            [*command[:-1], str(tmp_path / "train.py"), str(tmp_path), *command[-1].split()],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return [[found[f"{life}-{process}"] for process in range(2)] for life in range(len(found) // 2)]

    return launch


def check(lives, launcher):
    """One process with two devices is the oracle; its losses are sums in the same order."""
    scope = {"jax": __import__("jax"), "optax": optax, "torch": torch, "ts": ts}
    exec(STEP, scope)
    right = scope["train"](ts.make_mesh(batch=2))
    for life, processes in enumerate(lives):
        for index, (text, coordinator, process_id, count, devices, losses) in enumerate(processes):
            assert text == f"process {index} of 2 ({launcher}), meeting at {coordinator}"
            assert (process_id, count, devices) == (index, 2, 1)
            if life == len(lives) - 1:
                np.testing.assert_allclose(losses, right, rtol=1e-6)  # float32, fused for one device or for two
    places = [{process[1] for process in processes} for processes in lives]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == len(lives)  # another place for each life


def test_two_processes_with_the_variables_of_torchrun_are_a_job(tmp_path):
    """As its agent sets them; the launcher itself takes another import of torch."""
    begin = 'jax.config.update("jax_num_cpu_devices", 1)\nos.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)\n'
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with Family(begin + SCRIPT, 2, tmp_path, **told, TORCHELASTIC_RUN_ID="none") as family:
        family.wait([0, 1], 60)
    assert [end.status for end in family.ends] == [0, 0], family.ends
    check([[json.loads((tmp_path / f"0-{rank}.json").read_text()) for rank in range(2)]], "torchrun")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_torchrun_starts_a_job_again(launch):
    lives = launch(*TORCHRUN, "--max-restarts", "1", "--monitor-interval", "0.1", "fails")
    assert len(lives) == 2
    check(lives, "torchrun")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun of Open MPI is not installed")
def test_open_mpi_starts_a_job(launch):
    check(launch("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, ""), "Open MPI")
