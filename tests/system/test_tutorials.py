"""Every tutorial runs to its last assert."""

import pathlib

import pytest

from tests.oracles.processes import run_alone

ROOT = pathlib.Path(__file__).parents[2]

TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


def run(*arguments: object, cwd: pathlib.Path = ROOT, **environment: str) -> None:
    """Run a script in a process that has imported torch and JAX, without windows."""
    program = (
        "import runpy\nos.chdir(sys.argv.pop(1))\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    ended = run_alone(program, cwd, *arguments, timeout_s=600, MPLBACKEND="Agg", **environment)
    assert ended.status == 0, ended.output[-6000:]


ALWAYS = ("distributed_arrays",)  # the others are of functions that have tests of their own
EACH = [pytest.param(p, id=p.stem, marks=[] if p.stem in ALWAYS else pytest.mark.slow) for p in TUTORIALS]


@pytest.mark.parametrize("path", EACH)
def test_tutorial(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert path.read_text().rstrip().splitlines()[-1].startswith("assert")
    run(str(path), cwd=tmp_path)
