"""The packages within torch_shard: what one imports of another, the other's `__init__.py` exports."""

import ast
import pathlib

import torch_shard

ROOT = pathlib.Path(torch_shard.__file__).parent
# Imported file by file: packages without JAX use some files of _common, and a command loads what it needs of _demo.
OPEN = ("_common", "_demo")
FILES = sorted(ROOT.rglob("*.py"))
PACKAGES = sorted(path.parent.name for path in ROOT.glob("_*/__init__.py") if path.parent.name not in OPEN)


def imports_of_files(path):
    """The imports of a file that name a file of another package."""
    own = path.relative_to(ROOT).parts[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found += [name for name in names if _reaches_into(name.split("."), own)]
    return found


def _reaches_into(parts, own):
    return parts[0] == "torch_shard" and len(parts) > 2 and parts[1] in PACKAGES and parts[1] != own


def test_packages_import_no_files_of_each_other():
    found = {str(path.relative_to(ROOT)): imports_of_files(path) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_an_init_file_says_what_the_package_is_for_and_exports_only_what_other_packages_use():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    for name in PACKAGES:
        init = trees[ROOT / name / "__init__.py"]
        assert ast.get_docstring(init), name
        assert all(isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)) for node in init.body), name
        exported = {alias.name for node in init.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        used = {
            alias.name
            for path, tree in trees.items()
            if path.relative_to(ROOT).parts[0] != name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == f"torch_shard.{name}"
            for alias in node.names
        }
        assert exported == used, name
