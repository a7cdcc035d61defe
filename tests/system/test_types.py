"""How exactly the package is typed, and how many arguments its functions take by position."""

import ast
import pathlib

import torch_shard

PACKAGE = pathlib.Path(torch_shard.__file__).parent
MOST_ANY = 20  # per 1,000 lines
MOST_POSITIONAL = 4  # without self and cls
# They have the signatures of what PyTorch calls by position: ATen operators, functions of torch.
MIRRORS = (
    "_lowering/ops/",
    "_capture/replacements.py",
    "_capture/masks.py:_native_layer_norm",
    "_capture/autocast.py:init",
    "_device/dispatch.py:_rrelu",
)


def test_any_is_rare_arguments_are_few_and_options_spelled_out():
    count, lines, faults = 0, 0, []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        lines += len(text.splitlines())
        for owner in ast.walk(ast.parse(text)):
            count += isinstance(owner, ast.Name) and owner.id == "Any"
            for node in ast.iter_child_nodes(owner):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    where = f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"
                    faults += [f"{where} {fault}" for fault in faults_of(node, isinstance(owner, ast.ClassDef), where)]
    assert faults == []
    assert 1000 * count / lines < MOST_ANY


def faults_of(node, in_class, where):
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    count = len(node.args.posonlyargs) + len(node.args.args) - (in_class and not static)
    if count > MOST_POSITIONAL and not where.startswith(MIRRORS):
        yield f"takes {count}"
    for rest in (node.args.vararg, node.args.kwarg):
        if rest and ast.unparse(rest) == "options: Any":
            yield "takes any options"
