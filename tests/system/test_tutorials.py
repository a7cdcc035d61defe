"""Every tutorial runs to its last assert."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


def run(*arguments: str, cwd: pathlib.Path = ROOT) -> None:
    environment = {**os.environ, "MPLBACKEND": "Agg", "XLA_FLAGS": ""}  # no windows, compiled as users do
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


ALWAYS = ("distributed_arrays",)  # the others are of functions that have tests of their own
EACH = [pytest.param(p, id=p.stem, marks=[] if p.stem in ALWAYS else pytest.mark.slow) for p in TUTORIALS]


@pytest.mark.parametrize("path", EACH)
def test_tutorial(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert path.read_text().rstrip().splitlines()[-1].startswith("assert")
    run(str(path), cwd=tmp_path)
