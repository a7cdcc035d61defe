"""Signals between two steps save the state and end the run."""

import itertools
import os
import signal

import pytest

import torch_shard as ts
from tests.oracles.processes import run_processes
from tests.tables.runs import DATA, LOADERS, STEPS, losses, run


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_saves_and_leaves(number, error, step, tmp_path):
    before = signal.getsignal(number)

    def batches(position):
        for n in itertools.count(position):
            if n == 5:
                os.kill(os.getpid(), number)
            yield DATA[:8] * (n + 1)

    with pytest.raises(error) as left:
        run(step, batches, tmp_path / "parts", prefetch=1)
    if error is SystemExit:
        assert left.value.code == 143
    assert signal.getsignal(number) is before
    saved = ts.Checkpointer(tmp_path / "parts" / "checkpoints").steps()[-1]
    assert 3 < saved < STEPS
    run(step, LOADERS["function"](), tmp_path / "whole", steps=saved)
    state = ts.Checkpointer(tmp_path / "parts" / "checkpoints").restore(step)
    assert int(state.num_batches) == saved


def test_processes_stop_together(tmp_path):
    """A signal to one of two processes lets both save the same step, and leave."""
    run_processes(
        f"""
        import itertools, signal
        from pathlib import Path
        from tests.tables import runs as t

        directory = Path({str(tmp_path)!r})

        def batches(position):
            for number in itertools.count(position):
                if number == 6 and rank == 1:
                    signal.raise_signal(signal.SIGTERM)
                yield t.DATA[:8] * (number + 1)

        step = t.make_step(2, 2)
        try:
            t.run(step, batches, directory, steps=10 * t.STEPS, prefetch=1)  # when they stop is for them to agree on
        except SystemExit as left:
            assert left.code == 143
        else:
            raise AssertionError("it should have left")
        steps = ts.Checkpointer(directory / "checkpoints").steps()
        (directory / f"steps{{rank}}").write_text(repr(steps))
        """,
        2,
    )
    first, second = ((tmp_path / f"steps{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert 3 < eval(first)[-1] < 10 * STEPS
    assert len(losses(tmp_path / "log")) == eval(first)[-1]
