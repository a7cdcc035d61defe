"""The table of what the package reaches into of torch: whole, and true of the release that is installed."""

import ast
import contextlib
import importlib
import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.torch_version import TorchVersion

import torch_shard
from tests.tables.torch_internals import INTERNALS, OLDEST, Internals

PACKAGE = pathlib.Path(torch_shard.__file__).parent

SOURCES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}

RELEASE = TorchVersion(torch.__version__.partition("+")[0])

INTERNAL = ("torch.fx.experimental", "torch.utils._python_dispatch")


def is_there(row: Internals, name: str) -> bool:
    for path in row.owner, f"{row.owner}.{name}":
        if path.replace(".", "").isidentifier():
            with contextlib.suppress(ImportError):
                importlib.import_module(path)
    owner = sys.modules.get(row.owner) or eval(row.owner, {"torch": torch})  # torch.optim takes its modules' names away
    return hasattr(owner, name)


@pytest.mark.parametrize("row", INTERNALS, ids=lambda row: f"{row.owner} {row.names.split()[0]}")
def test_this_release_has_what_the_table_says(row: Internals) -> None:
    expected = TorchVersion(row.since) <= RELEASE and (row.until is None or TorchVersion(row.until) > RELEASE)
    assert {name: is_there(row, name) for name in row.names.split()} == dict.fromkeys(row.names.split(), expected)


def dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_torch(tree: ast.AST) -> Iterator[str]:
    """What a source names below torch, in full."""
    imported = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imported.values()
    for node in ast.walk(tree):
        first, _, rest = dotted(node).partition(".")
        if rest and first in imported:
            yield f"{imported[first]}.{rest}"


def test_the_table_has_all_that_the_package_names() -> None:
    listed = {f"{row.owner}.{name}" for row in INTERNALS for name in row.names.split()}
    modules = {f"{row.owner}." for row in INTERNALS}
    unlisted = {
        name
        for tree in SOURCES.values()
        for name in of_torch(tree)
        if any(map(is_private, name.split("."))) or name.startswith(INTERNAL)
        if not any(name == known or name.startswith(f"{known}.") or known.startswith(f"{name}.") for known in listed)
        if not any(module.startswith(f"{name}.") for module in modules)
        if not name.startswith("torch.ops.")
    }
    assert unlisted == set()


def test_private_attributes_of_objects_are_our_own_or_in_the_table() -> None:
    of_trainers = PACKAGE / "hf.py", PACKAGE / "lightning.py"  # whose trainers' own tests tell
    nodes = [node for path, tree in SOURCES.items() if path not in of_trainers for node in ast.walk(tree)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    own |= {name for row in INTERNALS for name in row.names.split()} | OF_OTHERS
    of_objects = (node for node in attributes if dotted(node).partition(".")[0] not in ("torch", "aten"))
    assert {node.attr for node in of_objects} - own == set()


OF_OTHERS = {
    "_apply_gate",  # of transformers' experts
    "_bit_generator",  # of NumPy's RandomState
    "_default_apply_gate",  # of transformers' experts
    "_forward_cls",  # of the class behind an autograd.Function, which PyTorch's documentation shows
    "_getframe",  # of sys
    "_orig_mod",  # of what torch.compile made: it stands in its state_dict
    "_register_atexit",  # of threading
}


def test_the_table_has_nothing_that_the_package_does_not_name() -> None:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [name for row in INTERNALS for name in row.names.split() if name not in text] == []


def test_this_release_has_every_operator_that_the_package_names() -> None:
    gone = {f"aten.{name}" for row in INTERNALS if row.owner == "torch.ops.aten" for name in row.names.split()}
    named = {
        ".".join(parts[parts.index("aten") :][:3])
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if "aten" in (parts := dotted(node).split("."))[:-1]
    }
    missing = {name for name in named if not has_operator(name.split(".")[1:])}
    assert {name for name in missing if ".".join(name.split(".")[:2]) not in gone} == set()


def has_operator(path: list[str]) -> bool:
    packet = getattr(torch.ops.aten, path[0], None)
    return packet is not None and (len(path) == 1 or path[1] in packet.overloads() or hasattr(packet, path[1]))


def test_the_oldest_release_is_that_of_the_package() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"torch>={OLDEST},' in text
