"""What of a compiled program's memory holds values that the forward pass leaves for the backward pass."""

from collections.abc import Iterator

from torch_shard._cost.hlo import Hlo, Instruction

_ALIASES = ("bitcast", "copy-done", "optimization-barrier", "opt-barrier")


def saved_bytes(text: str) -> float:
    """Bytes of one device that instructions of the forward pass compute and those of the backward pass read."""
    hlo = Hlo(text)
    entry, sources = hlo.computations[hlo.entry], _Sources(hlo)
    parts = {i.name: i.label.split("/") for i in entry}
    forward = {
        i.name
        for i in entry
        if i.label and i.op not in ("parameter", "constant") and not {"backward", "optimizer"} & set(parts[i.name])
    }
    given = {name for i in entry if "backward" in parts[i.name] for name in i.operands if name in hlo.made}
    read = {source for name in given for source in sources.of(name)}
    arrays = [hlo.operand(name)[at] for name, at in read if name in forward]
    return sum(array.num_padded_bytes for array in arrays if not array.is_on_chip)


class _Sources:
    """Follows values through what only names them anew, to instructions and which of their results they are."""

    def __init__(self, hlo: Hlo) -> None:
        self._hlo = hlo

    def of(self, name: str) -> Iterator[tuple[str, int]]:
        """What made the arrays of a value."""
        made = self._hlo.made[name]
        if made.op == "get-tuple-element":
            yield from self._element(made.operands[0], _index(made))
        elif made.op in ("tuple", *_ALIASES):
            for operand in made.operands:
                yield from self.of(operand)
        else:
            yield from ((name, at) for at in range(len(made.results)))

    def _element(self, name: str, index: int) -> Iterator[tuple[str, int]]:
        made = self._hlo.made[name]
        if made.op == "tuple":
            yield from self.of(made.operands[index])
        elif made.op == "while" and self._passes(made, index):
            yield from self._element(made.operands[0], index)
        elif index < len(made.results):
            yield name, index

    def _passes(self, loop: Instruction, index: int) -> bool:
        """Tell whether a loop hands an element of what it carries on as it came."""
        body, _ = self._hlo.inner(loop)[0]
        root = next(instruction for instruction in self._hlo.computations[body] if instruction.is_root)
        last = self._hlo.made[root.operands[index]] if root.op == "tuple" else root
        is_element = last.op == "get-tuple-element" and _index(last) == index
        return is_element and self._hlo.made[last.operands[0]].op == "parameter"


def _index(element: Instruction) -> int:
    return int(element.find(r"index=(\d+)") or 0)
