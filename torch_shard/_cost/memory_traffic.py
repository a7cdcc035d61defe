"""Bytes that instructions of a compiled program read from the device's memory and write to it.

What only a slice is read of counts as the slice; what is updated in place, as the update; what lies on the chip, not.
"""

import collections
import math

from torch_shard._cost.hlo import Array, Hlo, Instruction

_SLICES = ("dynamic-slice", "slice", "gather")
_ALIASES = ("bitcast", "copy", "reshape")
STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "async-start")
"""What moves beside the arithmetic."""


class Traffic:
    """Bytes read and written by the instructions of a program."""

    def __init__(self, hlo: Hlo) -> None:
        self._hlo = hlo
        self._users: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
        for instruction in hlo.made.values():
            for at, name in enumerate(instruction.operands if instruction.op != "parameter" else ()):
                self._users[name].append((instruction, at))

    def of(self, instruction: Instruction) -> float:
        """Bytes that one run of an instruction moves."""
        if instruction.op in STARTS:
            return self._of_start(instruction)
        inputs = enumerate(map(self._hlo.operand, instruction.operands))
        total = sum(min(size, self._read(instruction, at)) for at, arrays in inputs if (size := _in_memory(*arrays)))
        written, results = self._written(instruction), instruction.results
        if len(written) != len(results):
            return total + _in_memory(*results)
        return total + sum(min(_in_memory(array), part) for array, part in zip(results, written, strict=True))

    def _of_start(self, instruction: Instruction) -> float:
        sizes = [array.num_padded_bytes for array in instruction.results]
        if instruction.op == "copy-start":
            return _in_memory(*instruction.results[:2])
        if instruction.op == "slice-start":
            return sizes[min(1, len(sizes) - 1)] if sizes else 0
        return 2 * min(sizes, default=0)

    def _read(self, user: Instruction, at: int) -> float:
        """Bytes of an operand that an instruction reads; infinite where that may be all."""
        if user.op in _SLICES:
            return _size_of(*user.results) if at == 0 else 0
        if user.op == "dynamic-update-slice" and at != 1:
            return 0
        if user.op != "fusion" or not (called := self._hlo.called(user)):
            return math.inf
        body = self._hlo.computations[called[0]]
        waiting, total = [i.name for i in body if i.op == "parameter" and i.operands == [str(at)]], 0.0
        while waiting:
            for inner, place in self._users[waiting.pop()]:
                if inner.op in _ALIASES:
                    waiting.append(inner.name)
                else:
                    total += self._read(inner, place)
        return total

    def _written(self, instruction: Instruction) -> list[float]:
        """Bytes of each result that an instruction writes; infinite where that may be all."""
        if instruction.op == "dynamic-update-slice":
            return [_size_of(*self._hlo.operand(instruction.operands[1]))]
        if instruction.op != "fusion" or not (called := self._hlo.called(instruction)):
            return [math.inf]
        root = next(inner for inner in self._hlo.computations[called[0]] if inner.is_root)
        return [self._of_result(name) for name in (root.operands if root.op == "tuple" else [root.name])]

    def _of_result(self, name: str) -> float:
        made = self._hlo.made[name]
        while made.op in _ALIASES:
            made = self._hlo.made[made.operands[0]]
        written = self._written(made)
        return written[0] if len(written) == 1 else math.inf


def _size_of(*arrays: Array) -> float:
    return sum(array.num_padded_bytes for array in arrays)


def _in_memory(*arrays: Array) -> float:
    """Bytes that are not on the chip."""
    return _size_of(*(array for array in arrays if not array.is_on_chip))
