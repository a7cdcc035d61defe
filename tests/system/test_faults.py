"""Faults that a run must survive: it is killed at any moment, or its disk is full, and nothing is lost."""

import signal

import numpy as np
import pytest

from tests.oracles.processes import run_alone
from tests.oracles.survivor import FAULTS, STEPS

RUN = "from tests.oracles.survivor import train\ntrain(*sys.argv[1:])"


def run(directory, fault="none", after_s=60.0):
    """The status of a run, which is killed after so long."""
    directory.mkdir(exist_ok=True)
    ended = run_alone(RUN, directory, fault, timeout_s=after_s)
    assert ended.status in (0, None, -signal.SIGKILL), ended.output[-4000:]
    return ended.status


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert run(directory) == 0
    return directory


def assert_same_end(directory, whole):
    found, wanted = np.load(directory / "final.npz"), np.load(whole / "final.npz")
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert (directory / "log" / "metrics.jsonl").read_text().count('"train"') == STEPS


def whole_steps(directory):
    return sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step_*"))


def survive(directory, fault="none", after_s=60.0):
    """Let a run be killed; its checkpoints are then as they should be."""
    before = whole_steps(directory)
    status = run(directory, fault, after_s)
    after = whole_steps(directory)
    assert not before or after[-1] >= before[-1]  # nothing that was there is lost
    return status


@pytest.mark.slow
def test_killed_between_the_halves_of_a_save(uninterrupted):
    directory = uninterrupted.parent / "halves"
    for fault in FAULTS:
        assert survive(directory, fault) == -signal.SIGKILL
    last = whole_steps(directory)[-1]
    assert run(directory) == 0
    assert int((directory / "starts").read_text().split()[-1]) == last
    assert_same_end(directory, uninterrupted)
    assert whole_steps(directory) == [STEPS - 1, STEPS]
    assert not list((directory / "checkpoints" / ".unfinished").iterdir())


FULL_DISK = """
import ctypes, pathlib, subprocess
directory, user, group = pathlib.Path(sys.argv[1]), os.getuid(), os.getgid()
new_user, new_mounts = 0x10000000, 0x00020000  # a file system of our own, which only this process sees
if ctypes.CDLL(None, use_errno=True).unshare(new_user | new_mounts) == 0:
    for name, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
        pathlib.Path("/proc/self", name).write_text(text)
mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory], capture_output=True)
if mounted.returncode:
    print("no file system can be mounted here")
    sys.exit()
jax.config.update("jax_num_cpu_devices", 2)
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
    """One of 8 MB."""
    ended = run_alone(FULL_DISK, tmp_path)
    if "no file system can be mounted" in ended.output:
        pytest.skip("no file system can be mounted here")
    assert ended.status == 0, ended.output[-4000:]
