"""Ctrl-C, and ends without `close`, while a checkpoint is written."""

import os
import signal

import pytest
import torch

import torch_shard as ts
from tests.oracles.processes import run_alone
from tests.oracles.steps import step_of

PROGRAM = """
import os, signal, sys, optax, torch, torch_shard as ts
from jax.sharding import PartitionSpec as P

def loss_fn(model, x):
    return model(x).square().mean()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
plan = ts.ShardingPlan({}, default=P())
step = ts.make_train_step(torch.nn.Linear(4, 4), loss_fn, optax.adam(0.1), mesh=ts.make_mesh(batch=1), plan=plan)
ts.Checkpointer(sys.argv[1]).save(step.init())
if sys.argv[2] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("end", ["ended", "interrupted"])
def test_a_program_that_does_not_close_leaves_a_whole_checkpoint(end, tmp_path):
    ended = run_alone(PROGRAM, tmp_path, end)
    assert ended.status == (0 if end == "ended" else -signal.SIGINT), ended.output[-2000:]
    assert ended.output == "" or ended.output.rstrip().endswith("KeyboardInterrupt")
    assert ts.Checkpointer(tmp_path).steps() == [0]


@pytest.fixture
def step():
    return step_of(torch.nn.Linear(4, 4), mesh=(1, 1))


@pytest.fixture
def ctrl_c():
    """Ctrl-C as a program has it that was started in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_waits_for_the_state_to_be_taken_over(step, tmp_path, monkeypatch):
    state = step.init()
    with ts.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer._orbax.save

        def interrupted(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)
            return save(*args, **kwargs)

        monkeypatch.setattr(checkpointer._orbax, "save", interrupted)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(state)
        assert signal.getsignal(signal.SIGINT) is before
        assert not checkpointer.save(state)  # it is saved
    checkpointer.restore(step, step=0)


def test_an_interrupted_wait_forgets_nothing(step, tmp_path, monkeypatch):
    checkpointer = ts.Checkpointer(tmp_path)
    checkpointer.save(step.init())
    pending, interrupts = checkpointer._pending, iter([KeyboardInterrupt])

    class Interrupted:
        def exception(self, timeout=None):
            for interrupt in interrupts:
                raise interrupt
            return pending.exception(timeout)

    checkpointer._pending = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    with pytest.raises(BlockingIOError):
        ts.Checkpointer(tmp_path).claim()  # it is still written to
    checkpointer.close()
    assert checkpointer.steps() == [0]
