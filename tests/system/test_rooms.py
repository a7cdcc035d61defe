"""The rooms of the package: each is entered by its face."""

import ast
import pathlib

import pytest

import torch_shard

PACKAGE = pathlib.Path(torch_shard.__file__).parent
# Entered file by file: rooms that know no JAX use some files of _common, and a command loads what it needs of _demo.
OPEN = ("_common", "_demo")
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("_*/__init__.py") if path.parent.name not in OPEN)


def passes_by_the_face(path):
    """The imports of a file that reach into another room."""
    own = path.relative_to(PACKAGE).parts[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found += [name for name in names if _reaches_into(name.split("."), own)]
    return found


def _reaches_into(parts, own):
    return parts[0] == "torch_shard" and len(parts) > 2 and parts[1] in ROOMS and parts[1] != own


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_are_entered_by_their_faces(path):
    assert passes_by_the_face(path) == []


@pytest.mark.parametrize("name", ROOMS)
def test_a_face_says_what_the_room_is_for_and_nothing_else(name):
    tree = ast.parse((PACKAGE / name / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert all(isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)) for node in tree.body)


@pytest.mark.parametrize("name", ROOMS)
def test_a_face_has_only_names_that_other_rooms_use(name):
    face = ast.parse((PACKAGE / name / "__init__.py").read_text())
    exported = {alias.name for node in face.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    used = set()
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] != name:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == f"torch_shard.{name}":
                    used |= {alias.name for alias in node.names}
    assert exported == used
