"""Whether Python needs the value of a tensor only to raise an error, as assertions and checks of arguments do."""

import dis
import itertools
from types import CodeType, FrameType

_NO_BRANCH = ("UNARY_NOT", "TO_BOOL", "CALL", "PRECALL", "CACHE", "NOP", "COPY", "NOT_TAKEN")


def passing_truth(frame: FrameType) -> bool | None:
    """The truth value that passes a check.

    Args:
        frame: Is asking for the truth of a tensor, at its present instruction.

    Returns:
        The value for which the code goes on, if the other one leads straight to a `raise` that nothing in the same
        function catches. None where the value decides about anything else.
    """
    code = list(dis.get_instructions(frame.f_code))
    position = next(i for i, instruction in enumerate(code) if instruction.offset == frame.f_lasti)
    negated = False
    while code[position].opname in _NO_BRANCH:
        negated ^= code[position].opname == "UNARY_NOT"
        position += 1
    jump = code[position]
    if not (jump.opname.startswith("POP_JUMP") and jump.opname.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    jumps_if = jump.opname.endswith("IF_TRUE")
    after, target = code[position + 1].offset, jump.argval
    if _only_raises(frame.f_code, code, after, target):
        return jumps_if ^ negated
    return (not jumps_if) ^ negated if _only_raises(frame.f_code, code, target, after) else None


def _only_raises(function: CodeType, code: list[dis.Instruction], start: int, other: int) -> bool:
    """Whether every way on from the offset `start` raises an exception, before it could meet the way from `other`."""
    following = {a.offset: b.offset for a, b in itertools.pairwise(code)}
    at = {instruction.offset: instruction for instruction in code}
    ways, seen = [start], set()
    while ways:
        offset = ways.pop()
        name = at[offset].opname
        if offset == other or name.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND", "RERAISE")) or "BACKWARD" in name:
            return False
        if name == "RAISE_VARARGS":
            if _is_caught(function, code, offset):
                return False
            continue
        jumps = "JUMP" in name
        targets = [at[offset].argval] if jumps else []
        targets += [] if name in ("JUMP_FORWARD", "JUMP_ABSOLUTE") else [following[offset]]
        ways += [t for t in targets if t not in seen]
        seen.update(targets)
    return True


def _is_caught(function: CodeType, code: list[dis.Instruction], offset: int) -> bool:
    """Whether an `except` of the same function covers this place; leaving a `with` block does not count."""
    for entry in getattr(dis.Bytecode(function), "exception_entries", ()):
        if entry.start <= offset < entry.end:
            handler = [i.opname for i in code if i.offset >= entry.target][:4]
            if "PUSH_EXC_INFO" in handler and "WITH_EXCEPT_START" not in handler:
                return True
    return False
