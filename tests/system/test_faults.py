"""Faults that a run must survive: it is killed at any moment, or its disk is full, and nothing is lost."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.oracles.survivor import FAULTS, STEPS


class Runs:
    """Starts runs, one after the other, in a process that has everything imported."""

    def __init__(self, errors):
        command = [sys.executable, "-W", "ignore:os.fork", "-m", "tests.oracles.survivor"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        self._server = subprocess.Popen(command, text=True, bufsize=1, **pipes)

    def start(self, directory, fault="none"):
        directory.mkdir(exist_ok=True)
        self._server.stdin.write(f"{directory} {fault}\n")
        return int(self._server.stdout.readline())

    def status(self):
        return os.waitstatus_to_exitcode(int(self._server.stdout.readline()))

    def run(self, directory, fault="none"):
        self.start(directory, fault)
        return self.status()

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    errors = (tmp_path_factory.mktemp("errors") / "stderr").open("w")
    with errors, contextlib.closing(Runs(errors)) as started:
        yield started


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
    """The directory of a run that nothing disturbed, and how long it took, in seconds."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert runs.run(directory) == 0
    start = time.perf_counter()
    assert runs.run(directory.parent / "again") == 0  # with compiled programs at hand
    return directory, time.perf_counter() - start


def assert_same_end(directory, whole):
    found, wanted = np.load(directory / "final.npz"), np.load(whole / "final.npz")
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert (directory / "log" / "metrics.jsonl").read_text().count('"train"') == STEPS


def whole_steps(directory):
    return sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step_*"))


def survive(runs, directory, fault="none", after_s=None):
    """Let a run be killed; its checkpoints are then as they should be."""
    before = whole_steps(directory)
    child = runs.start(directory, fault)
    if after_s is not None:
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = runs.status()
    after = whole_steps(directory)
    assert not before or after[-1] >= before[-1]  # nothing that was there is lost
    return status


@pytest.mark.slow
def test_killed_between_the_halves_of_a_save(runs, uninterrupted):
    directory = uninterrupted[0].parent / "halves"
    for fault in FAULTS:
        assert survive(runs, directory, fault) == -signal.SIGKILL
    last = whole_steps(directory)[-1]
    assert runs.run(directory) == 0
    assert int((directory / "starts").read_text().split()[-1]) == last
    assert_same_end(directory, uninterrupted[0])
    assert whole_steps(directory) == [STEPS - 1, STEPS]
    assert not list((directory / "checkpoints" / ".unfinished").iterdir())


@pytest.mark.parametrize("num_kills", [pytest.param(3, id="3"), pytest.param(20, id="20", marks=pytest.mark.slow)])
def test_killed_at_random_moments(num_kills, runs, uninterrupted):
    whole, seconds = uninterrupted
    directory, moments, kills = whole.parent / f"kills-{num_kills}", random.Random(num_kills), 0
    while kills < num_kills:
        status = survive(runs, directory, after_s=moments.uniform(0.2, 1.0) * seconds)
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        if status == 0:  # it came to its end before: let the next ones begin anew
            assert_same_end(directory, whole)
            directory = whole.parent / f"kills-{num_kills}-{kills}"
    assert runs.run(directory) == 0
    assert_same_end(directory, whole)


FULL_DISK = """
import jax, optax, pathlib, pytest, sys, torch, torch_shard as ts
jax.config.update("jax_num_cpu_devices", 2)
directory = pathlib.Path(sys.argv[1])
options = {"mesh": ts.make_mesh(batch=2), "plan": ts.ShardingPlan({}, default=jax.P())}
model = torch.nn.Linear(256, 256)  # 0.8 MB with its moments
step = ts.make_train_step(model, lambda model, x: model(x).square().mean(), optax.adam(1e-3), **options)
batches = [torch.randn(4, 256)]
ballast = directory / "ballast"
with ts.Checkpointer(directory / "run", every=1) as checkpointer:
    state = ts.fit(step, None, batches, steps=2, checkpointer=checkpointer, progress=False)
    ballast.write_bytes(bytes(6_000_000))
    with pytest.raises(RuntimeError, match="(?s)could not be written.*newest whole one is that of step [23]") as found:
        ts.fit(step, state, batches, steps=8, checkpointer=checkpointer, progress=False)
    assert "space" in str(found.value), found.value
    steps = checkpointer.steps()
    assert steps[:2] == [1, 2] and len(steps) < 8
    assert int(checkpointer.restore(step).step) == steps[-1]
    ballast.unlink()
    state = ts.fit(step, None, batches, steps=8, checkpointer=checkpointer, progress=False)
assert int(ts.Checkpointer(directory / "run").restore(step).step) == 8
"""


def test_full_disk(tmp_path):
    """A file system of 8 MB of our own, which only this process sees."""
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=8m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*own, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    (tmp_path.parent / "full_disk.py").write_text(FULL_DISK)
    program = f"{sys.executable} {tmp_path.parent / 'full_disk.py'} {tmp_path}"
    done = subprocess.run([*own, f"{mount} && {program}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
