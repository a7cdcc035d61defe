"""One step, and a directory of checkpoints, for all tests of files."""

import shutil

import pytest

import torch_shard as ts
from tests.tables.checkpointed import by_name, make_step, train


@pytest.fixture(scope="session")
def step():
    return make_step()


@pytest.fixture(scope="session")
def saved(step, tmp_path_factory):
    """A directory with the checkpoints of steps 2, 3 and 4, the state of step 4, and the losses of the steps after."""
    directory = tmp_path_factory.mktemp("checkpoints") / "run"
    state = step.init(seed=3)
    with ts.Checkpointer(directory) as checkpointer:
        for stop in (2, 3, 4):
            state, _ = train(step, state, range(int(state.step), stop))
            assert checkpointer.save(state, metrics={"loss": stop / 2})
    values = by_name(state)
    return directory, values, train(step, state, range(4, 7))[1]


@pytest.fixture
def copied(saved, tmp_path):
    """The same directory, to damage."""
    return shutil.copytree(saved[0], tmp_path / "run")
