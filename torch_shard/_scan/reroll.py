"""Instructions that repeat become loops: the same instructions, each reading what the iteration before made.

Where iterations may begin is guessed from the order of the layers; that they are one loop is then proved from what each
instruction reads, or it is not one.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Literal, TypeVar

from torch_shard._scan.first_sums import with_first_sums
from torch_shard._scan.instructions import Instruction, Operand

Item = TypeVar("Item")

LONGEST_PERIOD = 4  # layers in one iteration: alternating kinds of attention have two, some hybrids three or four


SourceKind = Literal["own", "fixed", "carry", "each"]


@dataclasses.dataclass(frozen=True)
class Source:
    """The place where an instruction in a loop finds a source.

    Attributes:
        kind: `own`, of this iteration; `carry`, of the one before; `each`, one per iteration; `fixed`, always the same.
        number: Which of these; for `own`, the instruction that has made it.
        path: Indices into what that instruction gives.
    """

    kind: SourceKind
    number: int
    path: tuple[int, ...] = ()


@dataclasses.dataclass
class Loop:
    """Instructions that run several times.

    Attributes:
        iterations: The instructions of each.
        slots: For each instruction of an iteration, where its sources come from.
        carries: `(first value, number of the instruction, path)` of what one iteration hands to the next.
        each: Values that differ by iteration.
        fixed: Values that do not.
    """

    iterations: list[list[Instruction]]
    slots: list[list[Source]]
    carries: list[tuple[Operand, int, tuple[int, ...]]]
    each: list[tuple[Operand, ...]]
    fixed: list[Operand]

    @property
    def layers(self) -> list[str]:
        """Paths of the modules, in the order of their calls."""
        return [i.layer for i in itertools.chain(*self.iterations) if i.layer is not None]

    @property
    def is_backward(self) -> bool:
        """Tell whether it has backward passes of layers."""
        return any(instruction.is_backward for instruction in self.iterations[0])

    @property
    def reads(self) -> list[Operand]:
        """All that must be known before it starts."""
        return [*(first for first, _, _ in self.carries), *itertools.chain(*self.each), *self.fixed]


def reroll(instructions: list[Instruction]) -> list[Instruction | Loop]:
    """Replace instructions that repeat by loops, those with the most iterations first."""
    instructions = with_first_sums(instructions, LONGEST_PERIOD)
    order = {instruction: i for i, instruction in enumerate(instructions)}
    anchors = [i for i, instruction in enumerate(instructions) if instruction.layer is not None]
    found, begin, last, end = [], 0, -1, 0
    for at in range(len(anchors)):
        floor = 0 if at == last else end
        if at < begin or (stretch := _best(instructions, anchors[at:], order, floor)) is None:
            continue
        found.append(stretch)
        if at != last:  # what begins within a loop is no longer, unless it begins in its last iteration
            layers, count = len(stretch[2].layers), len(stretch[2].iterations)
            begin, end = at + layers - layers // count, stretch[1]
            last = begin
    found.sort(key=lambda stretch: -len(stretch[2].iterations))
    loops: dict[int, tuple[int, Loop]] = {}
    for first, stop, loop in found:
        if all(stop <= start or end <= first for start, (end, _) in loops.items()):
            loops[first] = stop, loop
    result: list[Instruction | Loop] = []
    end = 0
    for i, instruction in enumerate(instructions):
        if i in loops:
            end, loop = loops[i]
            result.append(loop)
        elif i >= end:
            result.append(instruction)
    return result


def _best(
    instructions: list[Instruction], anchors: list[int], order: dict[Instruction, int], floor: int
) -> tuple[int, int, Loop] | None:
    """Start and stop of the longest loop from the first anchor on, not before `floor`; of equal ones the shorter."""
    best = None
    for period in range(1, LONGEST_PERIOD + 1):
        starts = anchors[::period]
        if len(starts) < 2:
            break
        length = starts[1] - starts[0]
        for before in dict.fromkeys((0, length - 1, *range(length))):  # what lies between is the next one's, or not
            spans = _alike(instructions, [s - before for s in starts], length) if starts[0] - before >= floor else []
            most = 1 if best is None else len(best[2].iterations)
            loop = _prove(spans, order) if len(spans) > most else None
            if loop is not None and len(loop.iterations) > most:
                first = starts[0] - before
                best = first, first + length * len(loop.iterations), loop
    return best


def _alike(instructions: list[Instruction], starts: list[int], length: int) -> list[list[Instruction]]:
    """The longest run of stretches with instructions of the same kinds, one right after the other."""
    spans = []
    for number, start in enumerate(starts):
        span = instructions[start : start + length]
        spans.append(span)
        if start != starts[0] + number * length or [i.kind for i in span] != [i.kind for i in spans[0]]:
            return spans[:-1]
    return spans


def _prove(spans: list[list[Instruction]], order: dict[Instruction, int]) -> Loop | None:
    """The loop that these iterations are, or as many of the first of them as are one."""
    while len(spans) > 1:
        proof = _Proof(spans, order)
        if proof.holds == len(spans):
            return Loop(spans, proof.slots, list(proof.carries), list(proof.each), list(proof.fixed))
        spans = spans[: proof.holds]
    return None


class _Proof:
    """Origin of each source, if it is the same for the iterations; else for how many of them it is."""

    def __init__(self, spans: list[list[Instruction]], order: dict[Instruction, int]) -> None:
        self._start, self._order = order[spans[0][0]], order
        self._numbers = [{instruction: number for number, instruction in enumerate(span)} for span in spans]
        self.carries: dict[tuple[Operand, int, tuple[int, ...]], int] = {}
        self.each: dict[tuple[Operand, ...], int] = {}
        self.fixed: dict[Operand, int] = {}
        self.slots: list[list[Source]] = []
        self.holds = len(spans)
        for number in range(len(spans[0])):
            per_source = zip(*(span[number].sources for span in spans), strict=True)
            self.slots.append([self._slot(values) for values in per_source])

    def _slot(self, values: tuple[Operand, ...]) -> Source:
        first, own = values[0], self._made(0, values[0])
        handed = self._made(0, values[1])
        holds: dict[SourceKind, Callable[[int, Operand], bool]] = {
            "own": lambda q, v: own is not None and self._made(q, v) == own,
            "fixed": lambda q, v: v == first and self._is_before(v),
            "carry": lambda q, v: (
                self._is_before(v) if q == 0 else handed is not None and self._made(q - 1, v) == handed
            ),
            "each": lambda q, v: self._is_before(v),
        }
        lengths: dict[SourceKind, int] = {
            kind: sum(itertools.takewhile(bool, itertools.starmap(test, enumerate(values))))
            for kind, test in holds.items()
        }
        kind = max(lengths, key=lambda k: lengths[k])  # the first of those that hold longest
        self.holds = max(1, min(self.holds, lengths[kind]))
        if kind == "own":
            return Source(kind, *(own or (0, ())))
        if kind == "carry":
            number, path = handed or (0, ())
            return Source(kind, _index(self.carries, (first, number, path)))
        return Source(kind, _index(self.fixed, first) if kind == "fixed" else _index(self.each, values))

    def _made(self, iteration: int, value: Operand) -> tuple[int, tuple[int, ...]] | None:
        """The instruction of an iteration that has made a value, and its path."""
        number = self._numbers[iteration].get(value.source)  # pyright: ignore[reportArgumentType]
        return None if number is None else (number, value.path)

    def _is_before(self, value: Operand) -> bool:
        """Tell whether a value is known before the loop starts."""
        return isinstance(value.source, int) or self._order[value.source] < self._start


def _index(known: dict[Item, int], item: Item) -> int:
    return known.setdefault(item, len(known))
