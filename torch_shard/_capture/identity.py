"""Tensors of a model that the user's code knows by identity: within a capture, others are in their places."""

import builtins
import dis
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from torch_shard._capture.guards import Guard
from torch_shard._capture.provenance import describe

_MAY_BE_TENSORS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "BINARY_SUBSCR", "BINARY_OP")


def refuse_identity(
    guard: Guard, compared: Mapping[str, frozenset[str]], entries: Mapping[str, torch.Tensor], what: str
) -> None:
    """Refuse code that asks which of a model's tensors one is, by `id`, `is`, or as a key or an element."""
    names = {id(tensor): name for name, tensor in entries.items()}
    found: dict[str, dict[str, None]] = {}
    for variable, value in guard.hashed:
        if id(value) in names:
            found.setdefault(f"{variable} has as keys or elements", {})[names[id(value)]] = None
    for variable, value in guard.leaves:
        if type(value) is int and value in names:
            found.setdefault(f"{variable} has the id() of", {})[names[value]] = None
        elif id(value) in names and (line := _line_of(variable, compared)):
            found.setdefault(f"{line}\n  compares by identity, and {variable} has", {})[names[id(value)]] = None
    if found:
        listed = "\n".join(f"  {about} {_few(of)}" for about, of in found.items())
        raise NotImplementedError(
            f"{what} looks for tensors of the model by identity:\n\n{listed}\n\nIn a program others are in their "
            "places, so that none would be found. Compare names (`for name, p in model.named_parameters()`), or put a "
            "flag on the module that has the tensor."
        )


def _few(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:8]) + ", ..." * (len(shown) > 8)


def _line_of(variable: str, compared: Mapping[str, frozenset[str]]) -> str | None:
    last = variable.rpartition(".")[2]
    return next((line for line, names in compared.items() if last in names), None)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code objects within one."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from codes_in(const)


def named_in(code: CodeType) -> frozenset[str]:
    """All that code names from outside, and what is within it."""
    return frozenset(name for part in (code, *codes_in(code)) for name in (*part.co_names, *part.co_freevars))


def compared_line(code: CodeType, variables: dict[str, Any]) -> str | None:
    """The first line with an `is`, or an `id`, of what may be a tensor."""
    for part in (code, *codes_in(code)):
        before: list[dis.Instruction] = []
        for found in dis.get_instructions(part):
            is_asked = found.opname == "LOAD_GLOBAL" and found.argval == "id" and "id" not in variables
            if is_asked or (found.opname == "IS_OP" and _may_be_tensor(before, variables)):
                line = found.positions and found.positions.lineno
                return describe(traceback.FrameSummary(part.co_filename, line or 0, part.co_name))
            before.append(found)
    return None


def _may_be_tensor(before: list[dis.Instruction], variables: dict[str, Any]) -> bool:
    """Tell whether the value that these instructions have loaded last may be a tensor."""
    attributes: list[str] = []
    for found in reversed(before):
        if found.opname == "LOAD_ATTR":
            attributes.append(found.argval)
        elif found.opname in ("LOAD_GLOBAL", "LOAD_NAME"):  # a class, a member of an enum
            value = variables.get(found.argval, getattr(builtins, found.argval, None))
            for name in reversed(attributes):
                value = getattr(value, name, None)
            return isinstance(value, torch.Tensor)
        else:
            return found.opname.startswith(_MAY_BE_TENSORS)
    return False
