"""What of a compiled program's memory holds values that the forward pass leaves for the backward pass."""

import itertools
from collections.abc import Iterator

from torch_shard._cost.hlo import Hlo, Instruction

_ALIASES = ("bitcast", "copy-done", "optimization-barrier", "opt-barrier")


def saved_bytes(text: str, backward: str = "backward", after: str = "optimizer") -> float:
    """Bytes of one device that instructions of the forward pass compute and those of the backward pass read."""
    hlo = Hlo(text)
    entry = hlo.computations[hlo.entry]
    parts = {i.name: i.label.split("/") for i in entry}
    forward = {
        i.name
        for i in entry
        if i.label and i.op not in ("parameter", "constant") and not {backward, after} & set(parts[i.name])
    }
    values = _Origins(hlo, entry)
    readers = (i for i in entry if backward in parts[i.name])
    read = itertools.chain.from_iterable(values.of(name) for i in readers for name in i.operands)
    return sum(values.num_bytes(origin) for origin in set(read) if origin[0] in forward)


Origin = tuple[str, int]
"""An instruction that makes a value, and which of its results that is."""


class _Origins:
    """Follows values through what only names them anew."""

    def __init__(self, hlo: Hlo, entry: list[Instruction]) -> None:
        self._hlo = hlo
        self._made = {instruction.name: instruction for instruction in entry}

    def of(self, name: str) -> Iterator[Origin]:
        """The instructions that made the arrays of a value."""
        made = self._made.get(name)
        if made is None:
            return
        if made.op == "get-tuple-element":
            yield from self._element(made.operands[0], int(made.find(r"index=(\d+)") or 0))
        elif made.op in ("tuple", *_ALIASES):
            for operand in made.operands:
                yield from self.of(operand)
        else:
            yield from ((name, at) for at in range(len(made.results)))

    def _element(self, name: str, index: int) -> Iterator[Origin]:
        made = self._made.get(name)
        if made is not None and made.op == "tuple":
            yield from self.of(made.operands[index])
        elif made is not None and made.op == "while" and self._passes(made, index):
            yield from self._element(made.operands[0], index)
        else:
            yield name, index

    def _passes(self, loop: Instruction, index: int) -> bool:
        """Tell whether a loop hands an element of what it carries on as it came."""
        body = self._hlo.computations.get(loop.find(r"body=%?([\w.\-]+)") or "", [])
        by_name = {instruction.name: instruction for instruction in body}
        root = next((instruction for instruction in body if instruction.is_root), None)
        if root is None or root.op != "tuple":
            return False
        last = by_name.get(root.operands[index])
        return (
            last is not None
            and last.op == "get-tuple-element"
            and last.find(r"index=(\d+)") == str(index)
            and by_name[last.operands[0]].op == "parameter"
        )

    def num_bytes(self, origin: Origin) -> float:
        """Of one value."""
        name, index = origin
        results = self._made[name].results if name in self._made else []
        array = results[index] if index < len(results) else None
        return 0 if array is None or array.is_on_chip else array.num_padded_bytes
