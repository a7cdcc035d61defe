"""Damaged checkpoints are found, and passed over."""

import logging
import shutil

import pytest

import torch_shard as ts
from tests.tables.checkpointed import flip_a_bit, train
from torch_shard._io import checkpointer as _checkpoint


def test_damaged_checkpoint_is_passed_over(copied, step, caplog):
    shards = [file for file in (copied / "step_00000004").rglob("*") if file.is_file() and file.parent.name == "d"]
    flip_a_bit(max(shards, key=lambda file: file.stat().st_size))
    with ts.Checkpointer(copied, keep=2) as checkpointer:
        with caplog.at_level(logging.WARNING):
            state = checkpointer.restore(step)
        assert int(state.step) == 3
        (warning,) = (record.getMessage() for record in caplog.records if "damaged" in record.getMessage())
        assert "step_00000004 is damaged" in warning
        assert "its checksum differs, so some of its bits have changed" in warning
        with pytest.raises(ValueError, match="step_00000004 is damaged"):
            checkpointer.restore(step, step=4)
        # Training goes on, comes to step 4 again, and what replaces it is whole.
        state, _ = train(step, state, [3])
        assert checkpointer.save(state)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
        assert int(checkpointer.restore(step, step=4).step) == 4


def test_no_whole_checkpoint(tmp_path, copied, step):
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint in .*: there are none"):
        ts.Checkpointer(tmp_path / "nothing").restore(step)
    assert not (tmp_path / "nothing").exists()
    for path in copied.glob("step_*"):
        (path / "checksums.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint in .*: there are those of steps \[2, 3, 4\]"):
        ts.Checkpointer(copied).restore(step)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 9"):
        ts.Checkpointer(copied).restore(step, step=9)


def test_retention_never_counts_a_damaged_one(copied, step):
    flip_a_bit(copied / "step_00000004" / "state.json")
    with ts.Checkpointer(copied, keep=1) as checkpointer:
        state = checkpointer.restore(step)
        assert int(state.step) == 3
        shutil.rmtree(copied / "step_00000003")
        checkpointer.save(state)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]  # the damaged one of step 4 does not push out the whole one of step 3


@pytest.mark.parametrize(
    "moment", ["torch_shard._io.checkpointer.find_damage", "torch_shard._io.checkpointer.read_head"]
)
def test_checkpoint_that_its_writer_removes_is_no_trouble_to_a_reader(moment, copied, step, monkeypatch, caplog):
    """While it is read, another process saves a newer one and removes it."""
    name = moment.rpartition(".")[2]
    original, calls = getattr(_checkpoint, name), []

    def meanwhile(path, **options):
        calls.append(path.name)
        if len(calls) == 1:
            path.rename(copied / "step_00000005")
        return original(path, **options)

    monkeypatch.setattr(moment, meanwhile)
    assert int(ts.Checkpointer(copied).restore(step).step) == 4  # what it holds
    assert calls == ["step_00000004", "step_00000005"]
    assert "damaged" not in caplog.text
