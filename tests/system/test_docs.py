"""The documentation is whole: pages, examples, arguments, code in guides, and pages that say what is in the package."""

import ast
import contextlib
import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
import yaml

import torch_shard
from torch_shard import cli, collectives, hf, lightning, optim, plans

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
OFTEN = {"hosts", "plans"}
"""Pages whose code runs always; that of the others takes more than 3 s, and its parts have tests of their own."""
BEFORE = "<!-- before -->"  # where a page shows the lines of before.py
EIGHT_DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'

NAMES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (torch_shard, collectives, hf, lightning, optim, plans)
    for name in module.__all__
    if name not in ("collectives", "optim", "plans")
}


def members(name):
    """The functions of a public name by what `help` calls them: itself, or the methods of a class."""
    found = NAMES[name]
    if not inspect.isclass(found):
        return {name: found}
    ours = [cls for cls in reversed(found.__mro__) if cls.__module__.startswith("torch_shard")]
    held = {key: value for cls in ours for key, value in vars(cls).items()}
    written = {key: value for key, value in held.items() if not key.startswith("_") or key == "__call__"}
    methods = {f"{name}.{key}": getattr(value, "__func__", value) for key, value in written.items()}
    return {key: value for key, value in methods.items() if inspect.isfunction(value) and value.__doc__}


def test_every_public_name_has_a_page():
    pages = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


def test_every_public_name_has_an_example():
    """pytest runs them, as it collects the doctests of the package."""
    texts = {name: inspect.getdoc(public) or "" for name, public in NAMES.items()}
    parser = doctest.DocTestParser()
    assert [n for n, text in texts.items() if "\nExample:\n" not in text or not parser.get_examples(text)] == []


def test_help_says_what_every_function_is_and_every_argument():
    """The first line is an imperative or a noun phrase."""
    faults = []
    for key, function in [member for name in NAMES for member in members(name).items()] + list(NAMES.items()):
        text = inspect.getdoc(function) or ""
        given = [] if inspect.isclass(function) else inspect.signature(function).parameters
        if re.search(r"\._\w", str(inspect.signature(function))):
            faults.append(f"{key}: its signature has names of private modules")
        faults += [
            f"{key}: {p}"
            for p in given
            if p not in ("self", "cls") and not re.search(rf"^ +\**{p}: \S", text, re.MULTILINE)
        ]
        if re.search(r"^(What|Whether|How) |: (Likewise|As for|The same as for)\b", text):
            faults.append(key)
    assert faults == []


def code_of(page):
    """The program that a page is: its blocks of Python, and what its diffs come to, in their order."""
    text = page.read_text().replace(BEFORE, f"```python\n{(DOCS / 'before.py').read_text()}```")
    for language, block in FENCE.findall(text):
        if language == "python":
            yield block
        elif language == "diff":
            yield side_of(block, "+")


def side_of(diff, sign):
    """One side of a diff."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in ("", " ", sign))


WITH_CODE = [
    pytest.param(page, id=page.stem, marks=[] if page.stem in OFTEN else [pytest.mark.slow])
    for page in PAGES
    if page.stem != "README" and any(code_of(page))  # test_readme.py has that
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page are one program, run here, where there are eight devices already."""
    code = "".join(code_of(page)).replace(EIGHT_DEVICES, "")
    monkeypatch.chdir(tmp_path)
    name = f"page_{page.stem}"  # some pages are named like the package that they are about
    monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
    exec(compile(code, str(page), "exec"), vars(module))


def test_the_site_stays_one_that_is_read():
    """Pages with those that are made, words of README and pages, and rows of a page of results."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert len(re.findall(r"\.md$", nav, re.MULTILINE)) <= 30
    assert len((ROOT / "README.md").read_text().split()) <= 1100
    assert sum(len(page.read_text().split()) for page in PAGES) <= 22_000  # 26,000 with the tutorials that are pages
    for page in ("proof.md", "tpu.md"):
        made = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", (DOCS / page).read_text(), re.DOTALL)
        tables = [table for _, text in made for table in re.findall(r"^\| ---.*\n((?:\|.*\n)*)", text, re.MULTILINE)]
        assert 0 < sum(table.count("\n") for table in tables) <= 60


def test_every_block_of_code_is_one_that_a_test_reads():
    """Python and diffs run above; of the rest the syntax, and what the command line must know."""
    for page in PAGES:
        blocks = FENCE.findall(page.read_text())
        assert {language for language, _ in blocks} <= {"python", "diff", "sh", "yaml", "text"}, page
        for language, block in blocks:
            if language == "yaml":
                assert yaml.safe_load(block)
            if language == "sh":
                subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def commands():
    """Lines of the command `torch-shard` on all pages, in blocks and between words."""
    for page in PAGES:
        text = page.read_text()
        found = re.findall(r"`(torch-shard [^`]+)`", text) + re.findall(r"^(torch-shard .*)$", text, re.MULTILINE)
        yield from {" ".join(line.partition("#")[0].split()) for line in found}


def test_commands_and_their_options_exist():
    known = typer.main.get_command(cli.app).commands
    for line in commands():
        _, name, *words = shlex.split(line)
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


OLD_SIDES = {"accelerate", "ddp_fsdp2", "jax", "lightning", "torch_xla", "torchax"}
COMING_FROM = sorted((DOCS / "coming_from").glob("*.md"))


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_a_page_of_coming_from_is_short_and_has_a_whole_script(page):
    text = page.read_text()
    assert len(text.split()) <= 500
    assert "\n| there | here |\n" in text
    assert "\n## What is missing\n" in text
    (diff,) = [block for language, block in FENCE.findall(text) if language == "diff"]
    assert not [line for line in diff.splitlines() if line[:1] not in ("", " ", "+", "-")]
    if page.stem in OLD_SIDES:
        compile(side_of(diff, "-"), str(page), "exec")


HERE = {  # what a machine with one process and without a GPU needs
    "accelerate": ("bf16=True", "use_cpu=True, report_to=[]"),
    "ddp_fsdp2": ("batch_size=4", "batch_size=32"),
    "jax": ("", ""),
    "torchax": ("import jax\n", "import jax\n" + EIGHT_DEVICES + "\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_the_script_that_a_page_comes_from_runs_today(name, tmp_path, monkeypatch):
    """Those whose packages are installed; DDP's ends with the weights that ours has."""
    text = (DOCS / f"coming_from/{name}.md").read_text()
    (diff,) = [block for language, block in FENCE.findall(text) if language == "diff"]
    there = tmp_path / "there.py"
    there.write_text(side_of(diff, "-").replace(*HERE[name]))
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, there], cwd=tmp_path, env=os.environ | world, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    if name == "ddp_fsdp2":
        theirs = torch.load(tmp_path / "model.pt")
        monkeypatch.chdir(tmp_path)
        exec(side_of(diff, "+").replace(EIGHT_DEVICES, ""), {})
        torch.testing.assert_close(torch.load("model.pt"), theirs, rtol=1e-4, atol=1e-5)  # float32, four steps of Adam


@pytest.mark.slow
def test_the_script_of_several_hosts_is_previewed_and_trains(tmp_path):
    """It is one file, in a process of its own, which a preview leaves untrained."""
    (script,) = [code for code in code_of(DOCS / "guides/hosts.md") if code.startswith("# train.py\n")]
    (tmp_path / "train.py").write_text(script.replace("steps=300", "steps=3"))
    alone = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    for command, words in ((["-m", "torch_shard", "preview", "train.py"], "all-reduce"), (["train.py"], "fit: 3 of 3")):
        assert not (tmp_path / "run").exists()
        run = [sys.executable, *command]
        done = subprocess.run(run, cwd=tmp_path, env=alone, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert words in done.stdout
    assert (tmp_path / "run/step_00000003").is_dir()


METHODS = {
    "step": torch_shard.TrainStep,
    "state": torch_shard.TrainState,
    "saver": torch_shard.Checkpointer,
    "checkpointer": torch_shard.Checkpointer,
    "preview": torch_shard.Preview,
    "run": torch_shard.Run,
}
FOREIGN = ("torch", "optax", "jax", "torchax", "accelerate", "transformers", "jnp")


def calls():
    """What stands between words on all pages: where, and the expression."""
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        for code in re.findall(r"`([^`\n]+)`", text):
            with contextlib.suppress(SyntaxError):
                yield page.stem, code, ast.parse(code)


def found_by(node):
    """What a dotted name means, or None where it begins with a name that only the page knows."""
    match node:
        case ast.Name(id="ts"):
            return torch_shard
        case ast.Name(id="jnp"):
            return importlib.import_module("jax.numpy")
        case ast.Name(id=name) if name in METHODS:
            return METHODS[name]
        case ast.Name(id=name) if name in ("fit", "make_train_step", "make_mesh"):
            return getattr(torch_shard, name)
        case ast.Name(id=name) if name in FOREIGN:
            return importlib.import_module(name)
        case ast.Attribute(value, name):
            owner = found_by(value)
            if owner is None:
                return None
            if isinstance(owner, types.ModuleType) and not hasattr(owner, name):
                return importlib.import_module(f"{owner.__name__}.{name}")
            fields = {*getattr(owner, "__dataclass_fields__", {}), "num_compiles"}  # what objects have, and not classes
            return name if name in fields else getattr(owner, name)
    return None


def test_names_and_arguments_between_words_exist():
    """Those of this package, and of what it is installed with."""
    faults, count = [], 0
    for stem, code, tree in calls():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Call):
                try:
                    function = found_by(node.func if isinstance(node, ast.Call) else node)
                except (AttributeError, ImportError) as error:
                    faults.append(f"{stem}: {code}: {error}")
                    continue
                count += function is not None
                if isinstance(node, ast.Call) and getattr(function, "__module__", "").startswith("torch_shard"):
                    known = inspect.signature(function).parameters
                    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
                    wrong = [word.arg for word in node.keywords if word.arg not in known and not free]
                    faults += [f"{stem}: {code}: no {name}" for name in wrong]
    assert faults == []
    assert count > 200


def fixed_texts():
    """The constant parts of every string of the package, each on one line."""
    nodes = [n for path in (ROOT / "torch_shard").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\0".join(re.sub(r"\s+", " ", part) for text in strings for part in re.split(r"%[a-z.\d]+", text))


def test_errors_are_quoted_as_the_package_raises_them():
    """Between `...`, which stands for what varies, and after the name of the public function."""
    texts, missing = fixed_texts(), []
    quoted = re.findall(r"^```text\n(.*?)^```", (DOCS / "guides/wrong.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(quoted) > 40
    for quote in quoted:
        own = re.sub(r"^(initialize|fit|make_mesh): ", "", " ".join(quote.split()))
        missing += [part for part in own.split("...") if part.strip(" .,()") and part.strip() not in texts]
    assert missing == []


def test_the_figures_of_the_readme_are_those_of_the_table():
    table, readme = ((ROOT / page).read_text() for page in ("docs/proof.md", "README.md"))
    right = dict(re.findall(r"^\| all, (\w+) \|.* ([\d.]+ %) \|$", table, re.MULTILINE))
    said = re.search(r"([\d.]+ %) of the operators are right\s+forward and ([\d.]+ %) backward", readme)
    assert said.groups() == (right["forward"], right["gradient"])


def test_links_and_paths_lead_somewhere():
    """Those of README and its neighbours, which mkdocs does not see, and of pages as they lie in the repository."""
    found = {
        (page, target)
        for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    }
    code = re.findall(r"`((?:_\w+/|tests/|docs/)[\w/]*\.?\w*)`", (ROOT / "ARCHITECTURE.md").read_text())
    found |= {("ARCHITECTURE.md", path) for path in code}
    places = ROOT, ROOT / "torch_shard"
    assert [each for each in found if not any((place / each[1]).exists() for place in places)] == []
    # On GitHub pages are read where they lie; what the site has elsewhere is put right by generate.py.
    links = {
        (page, target)
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text())))
    }
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []
