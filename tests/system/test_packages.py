"""The packages within torch_shard: what one imports of another, the other's `__init__.py` exports."""

import ast
import collections
import pathlib
import subprocess
import sys

import torch_shard

ROOT = pathlib.Path(torch_shard.__file__).parent
OPEN = ("_common",)  # imported file by file: packages without JAX use some of its files
MOST_EXPORTS = {"_capture": 44, "_lowering": 52}  # of others, 40
FILES = sorted(ROOT.rglob("*.py"))
PACKAGES = sorted(path.parent.name for path in ROOT.glob("_*/__init__.py") if path.parent.name not in OPEN)


def test_packages_import_what_the_init_files_of_others_export_and_no_file_of_them():
    """An init file says what its package is for, and exports only what other packages use."""
    into_files, used, inits = [], collections.defaultdict(set), {}
    for path in FILES:
        own, tree = path.relative_to(ROOT).parts[0], ast.parse(path.read_text())
        inits |= {own: tree} if path == ROOT / own / "__init__.py" else {}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else names
            for top, package, *rest in (m.split(".") for m in modules if "." in m):
                if top == "torch_shard" and package in PACKAGES and package != own:
                    used[package].update(names)
                    into_files += [path] if rest else []
    assert into_files == []
    for name in PACKAGES:
        assert ast.get_docstring(inits[name]), name
        assert all(isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)) for node in inits[name].body), name
        froms = [node for node in inits[name].body if isinstance(node, ast.ImportFrom)]
        exported = {alias.name for node in froms for alias in node.names}
        assert exported == used[name], name
        assert len(exported) <= MOST_EXPORTS.get(name, 40), name


def _module(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: pathlib.Path) -> set[str]:
    """The modules of torch_shard that a file imports anywhere: at its top, for type checkers, within functions."""
    modules, found = set(map(_module, FILES)), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in modules else node.module for name in within)
    return found & modules


def test_no_modules_of_a_package_import_each_other_in_a_circle():
    """Not for type checkers either. A circle is left when those that import none of the others are taken away."""
    for package in (*PACKAGES, *OPEN):
        names = {_module(path) for path in (ROOT / package).rglob("*.py")}
        left = {_module(path): _imported(path) & names for path in (ROOT / package).rglob("*.py")}
        while free := [name for name, imported in left.items() if not imported & left.keys()]:
            left = {name: imported for name, imported in left.items() if name not in free}
        assert {name: sorted(imported & left.keys()) for name, imported in left.items()} == {}


def test_packages_that_take_long_are_imported_when_they_are_needed():
    code = "import sys, torch_shard as ts; print(ts.make_mesh(batch=-1))"
    late = ("matplotlib", "networkx", "orbax", "sympy", "tensorboardX", "transformers")  # sympy: torch's, for captures
    code += f"; print([name for name in {late} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "[]"
