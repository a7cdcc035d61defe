"""`torch-shard tutorials`: found, listed, run and written as notebooks; from a wheel too."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jupytext
import pytest
from typer.testing import CliRunner

from tests.oracles.errors import said
from torch_shard._demo import tutorials as _tutorial_files
from torch_shard._demo.tutorials import find_tutorials, read_headline, write_notebook
from torch_shard.cli import app

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tutorials").glob("*.py"))


def call(*arguments):
    return CliRunner().invoke(app, ["tutorials", *map(str, arguments)])


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Three tutorials in place of the package's own; each run leaves its name in a file."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    ends = {"first_steps": "", "fails": "raise SystemExit(7)", "killed": "import os; os.kill(os.getpid(), 9)"}
    for name, end in ends.items():
        log = tmp_path / "log"
        text = f"# %% [markdown]\n# # On {name}\n#\n# Words.\n\n# %%\nopen({str(log)!r}, 'a').write('{name} ')\n{end}\n"
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(_tutorial_files, "FOLDERS", (tmp_path / "none", folder))
    return tmp_path


def test_the_tutorials_of_a_checkout_are_all_found():
    assert list(find_tutorials().values()) == SCRIPTS != []


def test_list_has_names_and_headlines(shelf):
    assert call().stdout.splitlines() == [
        "fails        On fails",
        "first_steps  On first_steps",
        "killed       On killed",
    ]


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("# %% [markdown]\n# # A title\n", "A title"),
        ("# %% [markdown]\n#\n# Only a line.\n# More.\n", "Only a line."),
        ("import this\n", ""),
    ],
)
def test_headline_is_the_first_line_of_text(text, headline, tmp_path):
    path = tmp_path / "t.py"
    path.write_text(text)
    assert read_headline(path) == headline


@pytest.mark.parametrize(("name", "status"), [("first_steps.py", 0), ("fails", 7)])
def test_exit_status_is_that_of_the_script(name, status, shelf):
    assert call(name).exit_code == status
    assert (shelf / "log").read_text() == f"{name.removesuffix('.py')} "


def test_all_run_though_one_fails(shelf):
    result = call("--all")
    assert (shelf / "log").read_text() == "fails first_steps killed "
    assert result.exit_code == 7
    assert "1 of 3 tutorials ran to their end" in result.stdout
    assert result.stderr.splitlines() == ["fails failed with status 7.", "killed failed with status 137."]
    for name in ("fails", "killed"):
        (shelf / "shelf" / f"{name}.py").unlink()
    assert call("--all").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["first_step"], "Invalid value for NAME: there is no tutorial 'first_step'. Did you mean first_steps?"),
        (["fails", "--notebook", "x.py"], "a notebook ends in .ipynb, got 'x.py'"),
        (["fails", "--notebook", "nowhere/x.ipynb"], "cannot write to nowhere/x.ipynb: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, message, shelf):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in said(result)
    assert not (shelf / "log").exists()


def test_without_jupytext_the_error_says_what_to_install(shelf, monkeypatch):
    monkeypatch.setitem(sys.modules, "jupytext", None)
    result = call("fails", "--notebook", shelf / "x.ipynb")
    assert result.exit_code == 2
    assert "jupytext, which is not installed: pip install jupytext." in said(result)
    assert not (shelf / "x.ipynb").exists()


def test_notebook_that_fails_half_way_leaves_the_old_one(shelf, monkeypatch):
    (shelf / "x.ipynb").write_text("old")
    monkeypatch.setattr(Path, "replace", lambda self, other: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_notebook(find_tutorials()["fails"], shelf / "x.ipynb")
    assert (shelf / "x.ipynb").read_text() == "old"
    assert not list(shelf.glob(".*"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_tutorial_is_a_notebook_with_the_same_code(path, tmp_path):
    result = call(path.stem, "--notebook", tmp_path / "t.ipynb")
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "t.ipynb") in result.stdout.replace("\n", "")
    cells = json.loads((tmp_path / "t.ipynb").read_text())["cells"]
    script = path.read_text()
    assert [cell["cell_type"] == "markdown" for cell in cells] == [
        "[mark" in h for h in re.findall("^# %%.*", script, re.M)
    ]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(script))
    assert jupytext.read(tmp_path / "t.ipynb").metadata["kernelspec"]["name"] == "python3"
    assert read_headline(path)


def test_wheel_brings_the_tutorials(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    listing = "import torch_shard.cli as c; print(c.__file__); c.app(['tutorials'])"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", listing], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    where, *listed = done.stdout.splitlines()
    assert where == str(tmp_path / "site/torch_shard/cli.py")
    assert [line.split()[0] for line in listed] == [path.stem for path in SCRIPTS]
    for path in SCRIPTS:
        assert (tmp_path / "site/torch_shard/_tutorials" / path.name).read_text() == path.read_text()
