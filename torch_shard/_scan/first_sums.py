"""The first of several gradients that are added up one after the other, as a sum with zero: then all layers are alike.

A value that all layers read (a position bias, the states that a decoder attends to, a factor) has the sum of their
gradients. Autograd keeps the one that it has first, and adds the next to it: the backward pass of the last layer lacks
a sum that those of the others have.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax.numpy as jnp
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._scan.instructions import Instruction, Operand


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
    further = {value.source for item in instructions if item.is_sum for value in item.sources}
    for begin in _begins(instructions):
        for period in range(1, longest + 1):
            starts = begin[: 2 * period + 1 : period]
            pairs = _pairs(instructions, starts)
            pair = next((p for p in pairs if p.missing and all(m.like in further for m in p.missing)), None)
            if pair is not None:
                for front, item in pair.fill(zeros):
                    added.setdefault(front, []).append(item)
                break
    if not added:
        return list(instructions)
    return [*zeros.values(), *(each for item in instructions for each in (*added.get(item, ()), item))]


def _begins(instructions: Sequence[Instruction]) -> Iterator[list[int]]:
    """Where backward passes of layers stand, from the first of each kind on."""
    anchors = [at for at, instruction in enumerate(instructions) if instruction.layer and instruction.is_backward]
    seen = set[Hashable]()
    for number, at in enumerate(anchors):
        if (kind := instructions[at].kind) not in seen:
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
        self._first, self._own = first, set(first)
        self._alike: dict[Instruction, Instruction] = {}
        self._sums: dict[Instruction, _Missing] = {}
        holds = len(first) < len(second) and self._match(second)
        self.missing = list(self._sums.values()) if holds else []

    def _match(self, second: Sequence[Instruction]) -> bool:
        position, made = 0, set(second)
        for item in second:
            here = self._first[position] if position < len(self._first) else None
            if here is not None and self._are_alike(here, item, made):
                self._alike[item] = here
                position += 1
            elif (found := self._sum(item, second[0] if here is None else here)) is not None:
                self._sums[item] = found
            else:
                return False
        return position == len(self._first)

    def _are_alike(self, here: Instruction, item: Instruction, made: set[Instruction]) -> bool:
        pairs = zip(here.sources, item.sources, strict=False)
        return here.kind == item.kind and all(mine == self._mine(v) for mine, v in pairs if v.source in made)

    def _mine(self, value: Operand) -> Operand | None:
        """What the first layers have in place of what the others have made."""
        if value.source in self._sums:
            return self._sums[value.source].value
        alike = self._alike.get(value.source)  # pyright: ignore[reportArgumentType]
        return None if alike is None else Operand(alike, value.path)

    def _sum(self, item: Instruction, front: Instruction) -> _Missing | None:
        if not item.is_sum or item.fake is None:
            return None
        for term in (0, 1):
            value, before = self._mine(item.sources[term]), item.sources[1 - term]
            if value is not None and before.source in self._own:
                return _Missing(item, term, value, front)
        return None

    def fill(self, zeros: dict[Hashable, Instruction]) -> list[tuple[Instruction, Instruction]]:
        """The sums, each with the instruction that it belongs in front of; what reads the values reads these then."""
        found: list[tuple[Instruction, Instruction]] = []
        replaced: dict[Instruction, Operand] = {}
        for missing in self.missing:
            fake = missing.like.fake
            assert fake is not None
            about = tuple(fake.shape), fake.dtype
            zero = Operand(zeros.setdefault(about, _zeros(*about)))
            sources = [missing.value, zero] if missing.term == 0 else [zero, missing.value]
            item = dataclasses.replace(missing.like, sources=sources)
            replaced[missing.like] = Operand(item)
            found.append((missing.front, item))
            before = missing.like.sources[1 - missing.term]
            if before == missing.value:
                missing.like.sources[1 - missing.term] = Operand(item)
        for item, here in self._alike.items():
            for at, value in enumerate(item.sources):
                if value.source in replaced:
                    here.sources[at] = replaced[value.source]
        return found


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Instruction:
    return Instruction(("zeros", shape, dtype), [], lambda *_: jnp.zeros(shape, jax_dtype(dtype)))
