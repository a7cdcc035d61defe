"""Instructions that repeat become loops: the same instructions, each reading what the iteration before made.

Where iterations may begin is guessed from the order of the layers; that they are one loop is then proved from what each
instruction reads, or it is not one.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal, TypeVar

import jax.numpy as jnp
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._scan.instructions import Instruction, Operand

Item = TypeVar("Item")

# Layers in one iteration: alternating kinds of attention have two, some hybrids three or four.
LONGEST_PERIOD = 4


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
    candidates: list[tuple[int, int, Loop]] = []
    begin, last, end = 0, -1, 0
    for at in range(len(anchors)):
        if at < begin:
            continue
        floor = 0 if at == last else end
        candidate = _best(instructions, anchors[at:], order, floor)
        if candidate is None:
            continue
        candidates.append(candidate)

        # What begins within a loop is no longer than it, unless it begins in its last iteration.
        if at != last:
            _, stop, loop = candidate
            num_layers = len(loop.layers)
            begin = at + num_layers - num_layers // len(loop.iterations)
            end = stop
            last = begin

    # Of those that overlap, the one with the most iterations.
    candidates.sort(key=lambda candidate: -len(candidate[2].iterations))
    loops: dict[int, tuple[int, Loop]] = {}
    for first, stop, loop in candidates:
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
        # What lies between two layers belongs to the one after it, or to the one before: these are tried first.
        for before in dict.fromkeys((0, length - 1, *range(length))):
            first = starts[0] - before
            if first < floor:
                continue
            spans = _alike(instructions, [start - before for start in starts], length)
            most = 1 if best is None else len(best[2].iterations)
            if len(spans) <= most:
                continue
            loop = _prove(spans, order)
            if loop is not None and len(loop.iterations) > most:
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
        """The kind of a source, of which these are the values in the iterations."""
        first = values[0]
        made_in_same = self._made(0, first)
        made_in_previous = self._made(0, values[1])

        def is_own(iteration: int, value: Operand) -> bool:
            return made_in_same is not None and self._made(iteration, value) == made_in_same

        def is_fixed(iteration: int, value: Operand) -> bool:
            return value == first and self._is_before(value)

        def is_carry(iteration: int, value: Operand) -> bool:
            if iteration == 0:
                return self._is_before(value)
            return made_in_previous is not None and self._made(iteration - 1, value) == made_in_previous

        def is_each(iteration: int, value: Operand) -> bool:
            return self._is_before(value)

        tests: dict[SourceKind, Callable[[int, Operand], bool]] = {
            "own": is_own,
            "fixed": is_fixed,
            "carry": is_carry,
            "each": is_each,
        }
        lengths: dict[SourceKind, int] = {}
        for kind, test in tests.items():
            holding = itertools.takewhile(lambda pair, test=test: test(*pair), enumerate(values))
            lengths[kind] = sum(1 for _ in holding)

        # Of kinds that hold equally long the first: a value that is always the same needs no stack.
        kind = max(lengths, key=lambda k: lengths[k])
        self.holds = max(1, min(self.holds, lengths[kind]))

        if kind == "own":
            return Source(kind, *(made_in_same or (0, ())))
        if kind == "carry":
            number, path = made_in_previous or (0, ())
            return Source(kind, _index(self.carries, (first, number, path)))
        if kind == "fixed":
            return Source(kind, _index(self.fixed, first))
        return Source(kind, _index(self.each, values))

    def _made(self, iteration: int, value: Operand) -> tuple[int, tuple[int, ...]] | None:
        """The instruction of an iteration that has made a value, and its path."""
        number = self._numbers[iteration].get(value.source)  # pyright: ignore[reportArgumentType]
        return None if number is None else (number, value.path)

    def _is_before(self, value: Operand) -> bool:
        """Tell whether a value is known before the loop starts."""
        return isinstance(value.source, int) or self._order[value.source] < self._start


def _index(known: dict[Item, int], item: Item) -> int:
    return known.setdefault(item, len(known))


# The first of several gradients that are added up one after the other, as a sum with zero: then all layers are alike.
#
# A value that all layers read (a position bias, the states that a decoder attends to, a factor) has the sum of their
# gradients. Autograd keeps the one that it has first, and adds the next to it: the backward pass of the last layer
# lacks a sum that those of the others have.


@dataclasses.dataclass(frozen=True)
class _Missing:
    """A sum that the first layers lack.

    Attributes:
        like: That of the layers after them.
        term: Which of its sources is of its own layer; the other one is the sum before.
        value: What the first layers have in place of that source.
        front: In front of which instruction it belongs.
    """

    like: Instruction
    term: int
    value: Operand
    front: Instruction


def with_first_sums(instructions: Sequence[Instruction], longest: int) -> list[Instruction]:
    """The same instructions, and sums with zero where the backward pass of the first layers lacks sums of gradients."""
    zeros: dict[Hashable, Instruction] = {}
    added: dict[Instruction, list[Instruction]] = {}

    # A sum that the layers after the first ones have is read by a further sum, or it is none of such a chain.
    terms = {value.source for item in instructions if item.is_sum for value in item.sources}
    for begin in _begins(instructions):
        for period in range(1, longest + 1):
            starts = begin[: 2 * period + 1 : period]
            pairs = _pairs(instructions, starts)
            pair = next((p for p in pairs if p.missing and all(m.like in terms for m in p.missing)), None)
            if pair is not None:
                for front, item in pair.fill(zeros):
                    added.setdefault(front, []).append(item)
                break
    if not added:
        return list(instructions)

    result = list(zeros.values())
    for item in instructions:
        result += added.get(item, ())
        result.append(item)
    return result


def _begins(instructions: Sequence[Instruction]) -> Iterator[list[int]]:
    """Where backward passes of layers stand, from the first of each kind on."""
    anchors = [at for at, instruction in enumerate(instructions) if instruction.layer and instruction.is_backward]
    seen = set[Hashable]()
    for number, at in enumerate(anchors):
        kind = instructions[at].kind
        if kind not in seen:
            seen.add(kind)
            yield anchors[number:]


def _pairs(instructions: Sequence[Instruction], starts: Sequence[int]) -> Iterator["_Pair"]:
    """The layers from the first start to the next, and those after them, for each place where they may begin."""
    if len(starts) < 3:
        return
    first, second, third = starts
    length = third - second
    sums = sum(item.is_sum for item in instructions[second:third])
    for before in range(length):
        middle = second - before
        for num in range(1, sums + 1):
            start = middle - length + num
            if 0 <= start <= first < middle:
                yield _Pair(instructions[start:middle], instructions[middle : middle + length])


class _Pair:
    """The first layers, and those after them, which have some sums more: `missing`, none if that is not all."""

    def __init__(self, first: Sequence[Instruction], second: Sequence[Instruction]) -> None:
        self._first = first
        self._of_first = set(first)
        self._alike: dict[Instruction, Instruction] = {}
        self._sums: dict[Instruction, _Missing] = {}
        holds = len(first) < len(second) and self._match(second)
        self.missing = list(self._sums.values()) if holds else []

    def _match(self, second: Sequence[Instruction]) -> bool:
        """Go through both, and tell whether the second ones are the first ones and sums."""
        position = 0
        made = set(second)
        for item in second:
            here = self._first[position] if position < len(self._first) else None
            if here is not None and self._are_alike(here, item, made):
                self._alike[item] = here
                position += 1
                continue

            missing = self._sum(item, second[0] if here is None else here)
            if missing is None:
                return False
            self._sums[item] = missing
        return position == len(self._first)

    def _are_alike(self, here: Instruction, item: Instruction, made: set[Instruction]) -> bool:
        if here.kind != item.kind:
            return False
        for source, other in zip(here.sources, item.sources, strict=False):
            if other.source in made and source != self._counterpart(other):
                return False
        return True

    def _counterpart(self, value: Operand) -> Operand | None:
        """What the first layers have in place of what the others have made."""
        if value.source in self._sums:
            return self._sums[value.source].value
        alike = self._alike.get(value.source)  # pyright: ignore[reportArgumentType]
        return None if alike is None else Operand(alike, value.path)

    def _sum(self, item: Instruction, front: Instruction) -> _Missing | None:
        if not item.is_sum or item.fake is None:
            return None
        for term in (0, 1):
            value, before = self._counterpart(item.sources[term]), item.sources[1 - term]
            if value is not None and before.source in self._of_first:
                return _Missing(item, term, value, front)
        return None

    def fill(self, zeros: dict[Hashable, Instruction]) -> list[tuple[Instruction, Instruction]]:
        """The sums, each with the instruction that it belongs in front of; what reads the values reads these then."""
        sums: list[tuple[Instruction, Instruction]] = []
        replaced: dict[Instruction, Operand] = {}
        for missing in self.missing:
            fake = missing.like.fake
            assert fake is not None
            about = tuple(fake.shape), fake.dtype
            zero = Operand(zeros.setdefault(about, _zeros(*about)))
            sources = [missing.value, zero] if missing.term == 0 else [zero, missing.value]
            item = dataclasses.replace(missing.like, sources=sources)
            replaced[missing.like] = Operand(item)
            sums.append((missing.front, item))
            before = missing.like.sources[1 - missing.term]
            if before == missing.value:
                missing.like.sources[1 - missing.term] = Operand(item)
        for item, here in self._alike.items():
            for at, value in enumerate(item.sources):
                if value.source in replaced:
                    here.sources[at] = replaced[value.source]
        return sums


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Instruction:
    return Instruction(("zeros", shape, dtype), [], lambda *_: jnp.zeros(shape, jax_dtype(dtype)))
