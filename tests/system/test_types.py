"""How exactly the package is typed, and how many arguments its functions take by position.

`python -m tests.system.test_types` prints `Any` per 1,000 lines of each package.
"""

import ast
import collections
import pathlib
import sys
import tokenize

import torch_shard

PACKAGE = pathlib.Path(torch_shard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_ANY = 20  # per 1,000 lines

MOST_POSITIONAL = 4  # without self and cls
# They have the signatures of what PyTorch calls by position: ATen operators, functions of torch.
MIRRORS = (
    "_lowering/ops/",
    "_capture/replacements.py",
    "_capture/masks.py:_native_layer_norm",
    "_capture/autocast.py:_init.init",
    "_device/dispatch.py:_rrelu",
)


def count_any(path):
    """How often the name `Any` stands in the code of a file: its import counts, comments and strings do not."""
    with path.open("rb") as file:
        return sum(token.type == tokenize.NAME and token.string == "Any" for token in tokenize.tokenize(file.readline))


def packages():
    """For each package within torch_shard, and for the whole, how often `Any` stands in it, and its number of lines."""
    found = collections.defaultdict(lambda: [0, 0])
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        for package in (parts[0] if len(parts) > 1 else "(top)", "torch_shard"):
            found[package][0] += count_any(path)
            found[package][1] += len(path.read_text().splitlines())
    return found


def test_any_is_rare():
    count, lines = packages()["torch_shard"]
    assert 1000 * count / lines < MOST_ANY


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def functions(path):
    """The functions of a file, each with its qualified name and whether its first parameter is self or cls."""
    waiting = [(ast.parse(path.read_text()), "")]
    while waiting:
        owner, prefix = waiting.pop()
        for node in ast.iter_child_nodes(owner):
            name = f"{prefix}{node.name}" if hasattr(node, "name") and isinstance(node, DEFINITIONS) else prefix[:-1]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
                yield name, node, isinstance(owner, ast.ClassDef) and not static
            waiting.append((node, f"{name}." if name else ""))


FUNCTIONS = [
    (f"{path.relative_to(PACKAGE).as_posix()}:{name}", *rest) for path in FILES for name, *rest in functions(path)
]


def test_functions_take_four_arguments_by_position_at_most():
    found = []
    for where, node, is_method in FUNCTIONS:
        count = len(node.args.posonlyargs) + len(node.args.args) - is_method
        if count > MOST_POSITIONAL and not where.startswith(MIRRORS):
            found.append(f"{where} takes {count}")
    assert found == []


def test_options_are_spelled_out():
    named = [(where, a) for where, node, _ in FUNCTIONS for a in (node.args.vararg, node.args.kwarg) if a]
    assert [where for where, a in named if ast.unparse(a) == "options: Any"] == []


if __name__ == "__main__":
    for package, (count, lines) in sorted(packages().items(), key=lambda item: item[1][1]):
        sys.stdout.write(f"{package:15} {count:5} of {lines:6} lines: {1000 * count / lines:5.1f} per 1,000\n")
