"""What the command answers at once: by what it imports, for a machine's time says little."""

import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

import torch_shard as ts
import torch_shard.collectives

HEAVY = ("torch", "jax", "jaxlib", "torchax", "optax", "numpy", "orbax", "matplotlib", "safetensors")

CALLS = [["--help"], ["--version"], ["tutorials"], ["demo", "--help"], []]
MISSING = [
    *(["preview", "none.py"], ["prove", "none.py"], ["tune", "none.py"], ["replay", "none.py", "none"]),
    ["inspect", "none"],
]

COMMAND = f"""
import sys
from torch_shard.cli import main
for arguments in {MISSING + CALLS}:
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print("status", end.code or 0)
    print(arguments, [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""

LATE = """
import inspect, sys
import torch_shard as ts
assert "torch" not in sys.modules
found = {name: getattr(ts, name) for name in ts.__all__}
assert inspect.ismodule(found["collectives"]) and inspect.isclass(found["TrainState"])
assert all(getattr(found[name], "__name__", name) in (name, "torch_shard." + name) for name in found), found
import torch
assert torch.ones(2).to("jax").jax().shape == (2,)
from torch_shard import fit, make_mesh
try:
    ts.nothing
except AttributeError as error:
    print(error)
"""


def run(folder, text, *arguments):
    """Run a script that has the command's name, which is all that tells the command from a program."""
    (folder / "torch-shard").write_text(text)
    command = [sys.executable, str(folder / "torch-shard"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_answers_come_without_torch_and_jax(tmp_path):
    result = run(tmp_path, COMMAND)
    assert result.stderr.splitlines()[-1] == "[] []"
    assert [line for line in result.stderr.splitlines() if line.startswith("[")] == [
        f"{each} []" for each in MISSING + CALLS
    ]
    assert [line for line in result.stdout.splitlines() if line.startswith("status")] == (
        ["status 2"] * len(MISSING) + ["status 0"] * 4 + ["status 2"]
    )
    assert result.stderr.count("there is no file none") == len(MISSING)
    lines = result.stdout.splitlines()
    place = lines.index(f"torch-shard {ts.__version__}")
    assert lines[place + 1].startswith(f"Python {platform.python_version()} on ")
    assert {f"{name} {version(name)}" for name in ("torch", "jax", "jaxlib", "torchax")} <= set(lines)


def test_the_package_is_the_command_too(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "torch_shard", "tutorials"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("Distributed arrays, from torch: python ")
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "torch_shard.cli" in imported
    assert imported.isdisjoint(HEAVY)


MAIN = "from torch_shard.cli import main\nmain()\n"


def test_devices_are_those_of_jax(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    lines = run(tmp_path, MAIN, "--version", "--devices").stdout.splitlines()
    assert lines[0] == f"torch-shard {version('torch_shard')}"
    assert lines[-1] == "devices: 3 x cpu"


def test_devices_that_are_not_there_are_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    result = run(tmp_path, MAIN, "--devices")
    assert result.returncode == 0
    assert "nowhere" in result.stdout.splitlines()[-1]


def test_a_program_of_that_name_finds_every_name(tmp_path):
    result = run(tmp_path, LATE)
    assert result.stderr == ""
    assert result.stdout == "module 'torch_shard' has no attribute 'nothing'\n"


def test_a_program_has_every_name_at_once():
    assert set(ts.__all__) <= set(dir(ts))
    assert ts.collectives is torch_shard.collectives
    assert ts.__version__ == version("torch_shard")
    with pytest.raises(AttributeError, match="module 'torch_shard' has no attribute 'nothing'"):
        _ = ts.nothing
