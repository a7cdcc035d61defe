"""What the package declares of itself."""

import ast
import pathlib
import re
import sys
import tomllib

import torch_shard

PACKAGE = pathlib.Path(torch_shard.__file__).parent

NAMES = {"orbax-checkpoint": {"orbax"}, "lightning": {"lightning", "pytorch_lightning"}}
"""Of distributions whose modules have another name, or two."""


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    everything = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    found = (re.match(r"[\w-]+", line) for line in everything)
    names = [NAMES.get(match[0], {match[0]}) for match in found if match]
    declared = set[str]().union({"torch_shard"}, *names)
    imported: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            imported |= {name.split(".")[0]: str(path) for name in names}
    missing = {name: path for name, path in imported.items() if name not in declared | set(sys.stdlib_module_names)}
    assert missing == {}
