"""The command line from outside; tests/demo has its demo."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import torch_shard as ts
from torch_shard import cli

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


def test_version_and_help():
    assert CliRunner().invoke(cli.app, ["--version"]).stdout.splitlines()[0] == f"torch-shard {ts.__version__}"
    listed = CliRunner().invoke(cli.app, ["--help"])
    assert listed.exit_code == 0
    assert "demo" in listed.stdout


def test_tutorials_are_listed_with_headline_and_file(monkeypatch, tmp_path):
    lines = CliRunner().invoke(cli.app, ["tutorials"]).stdout.splitlines()
    assert [line.partition(": python ")[2] for line in lines] == [str(path) for path in TUTORIALS] != []
    assert lines[0].startswith("Distributed arrays, from torch: python ")
    monkeypatch.setattr(cli, "TUTORIALS", (tmp_path / "none",))
    assert CliRunner().invoke(cli.app, ["tutorials"]).stdout == ""


@pytest.mark.slow
def test_wheel_brings_the_tutorials(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    listing = [sys.executable, "-c", "import torch_shard.cli as c; c.app(['tutorials'])"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(listing, cwd=tmp_path, env=environment, capture_output=True, text=True)
    files = [Path(line.partition(": python ")[2]) for line in done.stdout.splitlines()]
    assert files == [tmp_path / "site/torch_shard/_tutorials" / path.name for path in TUTORIALS]
    assert [file.read_text() for file in files] == [path.read_text() for path in TUTORIALS]
