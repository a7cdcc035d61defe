"""The documentation is whole: pages, examples, arguments, code in guides, and pages that say what is in the package."""

import ast
import doctest
import inspect
import re
import sys
import types
from pathlib import Path

import pytest

import torch_shard
from torch_shard import collectives, optim, plans

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted(path for path in DOCS.rglob("*.md") if "```python" in path.read_text())
LONG = {"accelerate", "context", "ddp_fsdp2", "generate", "lightning", "llama", "maxtext", "nanogpt", "optimizers"}
LONG |= {"by_hand", "faq", "jax", "pipeline", "precision", "preview", "refused", "runs", "torch_xla", "tune"}
# What takes more than 3 s, of which each part has tests of its own.
PAGES = [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in GUIDES]
BEFORE = "<!-- before -->"  # where a page shows the lines of before.py
TABLE = "| there | here |"  # its right column is code that runs, row by row
ABBREVIATED = {  # what a cell of such a table may leave out
    "ts.make_train_step(...": "ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan",
    "ts.fit(...": "ts.fit(step, None, loader, steps=2, progress=False",
}
EIGHT_DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'

NAMES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (torch_shard, collectives, optim, plans)
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
    """Blocks of Python, and what stands in backticks in the right column of tables of lines, in their order."""
    text = page.read_text().replace(BEFORE, f"```python\n{(DOCS / 'before.py').read_text()}```")
    found = re.findall(
        rf"^```python\n(.*?)^```|^{re.escape(TABLE)}\n\|[ |-]+\n((?:\|[^\n]*\n)+)", text, re.DOTALL | re.MULTILINE
    )
    for block, table in found:
        yield block
        for row in table.splitlines():
            yield from (line + "\n" for line in re.findall(r"`([^`]+)`", row.split(" | ", 1)[1]))


@pytest.mark.parametrize("path", PAGES)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    """All blocks of a page are one program, run here, where there are eight devices already."""
    code = "".join(code_of(path)).replace(EIGHT_DEVICES, "")
    for short, full in ABBREVIATED.items():
        code = code.replace(short, full)
    monkeypatch.chdir(tmp_path)
    name = f"page_{path.stem}"  # some pages are named like the package that they are about
    monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
    exec(compile(code, str(path), "exec"), vars(module))


def test_every_page_of_coming_from_has_a_table_of_lines():
    for page in (DOCS / "coming_from").glob("*.md"):
        assert page.stem in ("torchtpu", "nanogpt") or f"{TABLE}\n" in page.read_text(), page.stem


def fixed_texts():
    """The constant parts of every string of the package, each on one line."""
    nodes = [n for path in (ROOT / "torch_shard").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\0".join(re.sub(r"\s+", " ", part) for text in strings for part in re.split(r"%[a-z.\d]+", text))


def test_errors_are_quoted_as_the_package_raises_them():
    """Between `...`, which stands for what varies, and after the name of the public function."""
    texts, missing = fixed_texts(), []
    for page in ("faq.md", "guides/refused.md"):
        quoted = re.findall(r"^```text\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
        assert len(quoted) > 10
        for quote in quoted:
            own = re.sub(r"^(initialize|fit|make_mesh): ", "", " ".join(quote.split()))
            missing += [part for part in own.split("...") if part.strip(" .,()") and part.strip() not in texts]
    assert missing == []


def test_the_figures_of_the_readme_are_those_of_the_table():
    table, readme = ((ROOT / page).read_text() for page in ("validation/operators/coverage.md", "README.md"))
    right = dict(re.findall(r"^\| all, (\w+) \|.* ([\d.]+ %) \|$", table, re.MULTILINE))
    said = re.search(r"([\d.]+ %) of the operators are right\s+forward and ([\d.]+ %) backward", readme)
    assert said.groups() == (right["forward"], right["gradient"])


def test_links_and_paths_lead_somewhere():
    """Those of README and its neighbours, which mkdocs does not see."""
    found = {
        (page, target)
        for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    }
    for page in ("ARCHITECTURE.md", "docs/guides/patches.md"):
        code = re.findall(r"`((?:_\w+/|tests/|docs/)[\w/]*\.?\w*)`", (ROOT / page).read_text())
        found |= {(page, path) for path in code}
    places = ROOT, ROOT / "torch_shard"
    assert [each for each in found if not any((place / each[1]).exists() for place in places)] == []
