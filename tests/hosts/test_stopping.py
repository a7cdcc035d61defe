"""Signals between two steps save the state and end the run."""

import itertools
import os
import signal

import pytest

import torch_shard as ts
from tests.tables.runs import DATA, LOADERS, STEPS, make_step, run


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_saves_and_leaves_and_says_so(number, error, tmp_path, caplog):
    before, step = signal.getsignal(number), make_step(4, 2)

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
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.getMessage() == (
        f"fit: {signal.Signals(number).name} after {saved} of {STEPS} batches: step {saved} is saved in "
        f"{tmp_path / 'parts' / 'checkpoints'}, from which fit goes on. This process leaves."
    )
    run(step, LOADERS["function"](), tmp_path / "whole", steps=saved)
    state = ts.Checkpointer(tmp_path / "parts" / "checkpoints").restore(step)
    assert int(state.num_batches) == saved
