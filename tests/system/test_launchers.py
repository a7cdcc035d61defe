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
losses = train(ts.make_mesh(batch=2))
found = [str(launch), launch.coordinator, launch.process_id, jax.process_count(), jax.local_device_count(), losses]
(pathlib.Path(sys.argv[1]) / f"{{launch.process_id}}.json").write_text(json.dumps(found))
"""


def check(folder, launcher):
    """One process with two devices is the oracle; its losses are sums in the same order."""
    scope = {"jax": __import__("jax"), "optax": optax, "torch": torch, "ts": ts}
    exec(STEP, scope)
    right = scope["train"](ts.make_mesh(batch=2))
    processes = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for index, (text, coordinator, process_id, count, devices, losses) in enumerate(processes):
        assert text == f"process {index} of 2 ({launcher}), meeting at {coordinator}"
        assert (process_id, count, devices) == (index, 2, 1)
        np.testing.assert_allclose(losses, right, rtol=1e-6)  # float32, fused for one device or for two
    assert len({coordinator for _, coordinator, *_ in processes}) == 1


def test_two_processes_with_the_variables_of_torchrun_are_a_job(tmp_path):
    """As its agent sets them; the agent itself starts the tutorial of several hosts, and starts it again."""
    begin = 'jax.config.update("jax_num_cpu_devices", 1)\nos.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)\n'
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with Family(begin + SCRIPT, 2, tmp_path, **told, TORCHELASTIC_RUN_ID="none") as family:
        family.wait([0, 1], 60)
    assert [end.status for end in family.ends] == [0, 0], family.ends
    check(tmp_path, "torchrun")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun of Open MPI is not installed")
def test_open_mpi_starts_a_job(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    more = {"JAX_NUM_CPU_DEVICES": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    command = [*mpirun, sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    check(tmp_path, "Open MPI")
