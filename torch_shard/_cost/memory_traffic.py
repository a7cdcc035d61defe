"""Bytes that instructions of a compiled program read from the device's memory and write to it.

What only a slice is read of counts as the slice; what is updated in place, as the update; what lies on the chip, not.
"""

import collections
import math

from torch_shard._cost.hlo import Hlo, Instruction

_SLICES = ("dynamic-slice", "slice", "gather")
_ALIASES = ("bitcast", "copy", "reshape")
_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "async-start")
_MOST_STEPS = 50


class Traffic:
    """Bytes read and written by the instructions of a program."""

    def __init__(self, hlo: Hlo) -> None:
        self._hlo = hlo
        self._uses: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def of(self, instruction: Instruction) -> float:
        """Bytes that one run of an instruction moves."""
        if instruction.op in _STARTS:
            return self._of_start(instruction)
        if instruction.op == "fusion" and self._hlo.called(instruction):
            return self._of_fusion(instruction)
        results = _bytes_of(instruction)
        if instruction.op in _SLICES:
            return 2 * results
        if instruction.op == "dynamic-update-slice":
            return 2 * min(results, sum(a.num_padded_bytes for a in self._hlo.operand(instruction.operands[1])))
        return results + sum(a.num_padded_bytes for a in self._hlo.inputs(instruction) if not a.is_on_chip)

    def _of_start(self, instruction: Instruction) -> float:
        sizes = [array.num_padded_bytes for array in instruction.results]
        if instruction.op == "copy-start":
            return sum(array.num_padded_bytes for array in instruction.results[:2] if not array.is_on_chip)
        if instruction.op == "slice-start":
            return sizes[min(1, len(sizes) - 1)] if sizes else 0
        return 2 * min(sizes, default=0)

    def _of_fusion(self, fusion: Instruction) -> float:
        body = self._hlo.called(fusion)[0]
        total = 0.0
        for number, name in enumerate(fusion.operands):
            whole = sum(a.num_padded_bytes for a in self._hlo.operand(name) if not a.is_on_chip)
            total += min(whole, self._read(body, number)) if whole else 0
        written, results = self._written(body), fusion.results
        for at, array in enumerate(results):
            if not array.is_on_chip:
                updated = written[at] if len(written) == len(results) else None
                total += array.num_padded_bytes if updated is None else min(array.num_padded_bytes, updated)
        return total

    def _users(self, computation: str) -> dict[str, list[tuple[Instruction, int]]]:
        if computation not in self._uses:
            uses: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
            for instruction in self._hlo.computations[computation]:
                for at, name in enumerate(instruction.operands if instruction.op != "parameter" else ()):
                    uses[name].append((instruction, at))
            self._uses[computation] = uses
        return self._uses[computation]

    def _read(self, computation: str, number: int) -> float:
        """Bytes of a parameter that are read; infinite where that may be all."""
        parameters = {int(i.operands[0]): i.name for i in self._hlo.computations[computation] if i.op == "parameter"}
        waiting, total = [parameters.get(number, "")], 0.0
        for _ in range(_MOST_STEPS):
            if not waiting:
                break
            for user, at in self._users(computation).get(waiting.pop(), []):
                if user.op in _ALIASES:
                    waiting.append(user.name)
                elif user.op in _SLICES:
                    total += sum(array.num_padded_bytes for array in user.results) if at == 0 else 0
                elif user.op == "fusion" and self._hlo.called(user):
                    total += self._read(self._hlo.called(user)[0], at)
                elif user.op != "dynamic-update-slice" or at != 0:
                    return math.inf
        return total

    def _written(self, computation: str) -> list[float | None]:
        """For each result of a computation the bytes that are written, where these are a part of it."""
        by_name = {instruction.name: instruction for instruction in self._hlo.computations[computation]}
        root = next((i for i in by_name.values() if i.is_root), None)
        if root is None:
            return []
        names = root.operands if root.op == "tuple" else [root.name]
        return [self._updated(by_name, by_name.get(name)) for name in names]

    def _updated(self, by_name: dict[str, Instruction], result: Instruction | None) -> float | None:
        while result is not None and result.op in _ALIASES and result.operands:
            result = by_name.get(result.operands[0])
        if result is None:
            return None
        if result.op == "dynamic-update-slice":
            return sum(array.num_padded_bytes for array in self._hlo.operand(result.operands[1]))
        inner = self._written(self._hlo.called(result)[0]) if result.op == "fusion" and self._hlo.called(result) else []
        return inner[0] if len(inner) == 1 else None


def _bytes_of(instruction: Instruction) -> float:
    return sum(array.num_padded_bytes for array in instruction.results if not array.is_on_chip)
