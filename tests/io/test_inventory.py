"""What a checkpoint says that it holds."""

import json

import pytest
from typer.testing import CliRunner

import torch_shard as ts
from tests.tables.checkpointed import flip_a_bit
from torch_shard._io.inventory import find_checkpoint
from torch_shard.cli import app


def test_metadata_names_every_entry(saved):
    head = json.loads((saved[0] / "step_00000004" / "state.json").read_text())
    assert head["metrics"] == ts.Checkpointer(saved[0]).metrics(4) == {"loss": 2.0}
    with pytest.raises(ValueError, match="step_00000009 is not a checkpoint"):
        ts.Checkpointer(saved[0]).metrics(9)
    names = {name for stored in head["stored"] for name in stored["names"] if stored["where"] == "tensors"}
    assert {"blocks.0.up.weight", "blocks.3.up.weight", "norm.running_mean", "scale", "first.weight"} <= names


def test_inspect_shows_what_is_inside(copied):
    shown = CliRunner().invoke(app, ["inspect", str(copied), "--verify"])
    assert shown.exit_code == 0
    for line in (
        "step_00000004: step 4, 4 batches seen",
        "loss 2",
        "on mesh (batch=4, model=2)",
        "whole: every file has its checksum",
    ):
        assert line in shown.stdout
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")]
        for line in shown.stdout.splitlines()
        if "│" in line
    }
    assert rows["blocks.2.down.weight"][2:8] == [
        "params",
        "(8, 16)",
        "float32",
        "P(None, 'model')",
        "512 bytes",
        "row 2 of 4",
    ]
    assert rows["scale"][2] == "buffers, not in state_dict"
    assert rows["opt_state[0].mu"][2] == "21 entries"
    head = copied / "step_00000004" / "state.json"
    text = head.read_text()
    head.write_text(text.replace('"step": 4', '"step": -1'))
    assert CliRunner().invoke(app, ["inspect", str(copied)]).exit_code == 2
    head.write_text(text)
    flip_a_bit(copied / "step_00000004" / "checksums.json")
    damaged = CliRunner().invoke(app, ["inspect", str(copied / "step_00000004"), "--verify"])
    assert damaged.exit_code == 1
    assert "damaged: " in damaged.stdout


def test_a_checkpoint_is_not_a_directory_of_them_nor_the_run_above(copied):
    with pytest.raises(ValueError, match=rf"step_00000004 is a checkpoint; .* {copied}, and `restore"):
        ts.Checkpointer(copied / "step_00000004")
    with pytest.raises(FileNotFoundError, match=f"Below it are some: {copied}"):
        find_checkpoint(copied.parent)
