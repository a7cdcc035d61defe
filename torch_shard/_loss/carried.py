"""Answers to Python's questions that one program serves: numbers that it is given with each call.

The loss is captured anew for each new answer, so that whatever Python does with a number (`if at + n > size:`) is right
by construction. Where that capture differs from an earlier one in numbers alone, these become inputs of one program,
which is compiled once. So the position in a queue may take any number of values.
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_shard._capture import Captured, Guard, HostInputs, HostPart, Mismatch, ModuleFlags, bits_of
from torch_shard._loss.joint import LossShape
from torch_shard._lowering import GraphOutline, Kind, Number, Place, outline_of, split_kinds, vectors
from torch_shard._scan import Call

MOST = 4096
"""Answers that a program keeps."""


class GivenInputs(NamedTuple):
    """The further inputs of a program for one call, and what that makes of buffers, where the host knows it."""

    inputs: list[torch.Tensor]
    later: Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """What came out of Python's questions in one capture, and what the program is given then.

    Attributes:
        host: Asks them again.
        given: The further inputs of the program: results of the host by number, and tensors that stay as they are.
        numbers: Of the graph, where they are inputs.
        literals: Tensors of Python's numbers, where they are, by their position in the closure.
        reads: What the capture has read, if that is not what the program's own has.
    """

    host: HostPart
    given: tuple[int | torch.Tensor, ...]
    numbers: Mapping[Place, Number]
    literals: Mapping[int, torch.Tensor]
    reads: Guard | None

    def run(self, inputs: HostInputs) -> GivenInputs | Mismatch:
        """What the program is given, or what has another value now."""
        found = self.host.run(self.host.read(inputs), inputs)
        if isinstance(found, Mismatch):
            return found
        return GivenInputs([found[n] if isinstance(n, int) else n for n in self.given], self.host.later)


class Answers:
    """The answers that a program serves; its further inputs follow the order of what it closes over."""

    def __init__(
        self,
        captured: Captured[Any],
        kinds: Mapping[Kind, list[Place]] | None = None,
        literals: Collection[int] = (),
    ) -> None:
        self._captured, self.kinds, self._literals = captured, kinds or {}, frozenset(literals)
        host = captured.host
        of_host = {id(tensor): number for number, tensor in enumerate(host.given)} if host else {}
        self._of_host = [of_host.get(id(tensor)) for tensor in captured.closure]
        self._found: dict[Hashable, list[Answer]] = {}
        self.num = 0
        """How many there are."""
        if host is not None and not self.kinds and not literals:
            self.add(host, {}, {}, None)

    @property
    def are_given(self) -> list[bool]:
        """Of the last inputs of the graph, which are given with each call; the others are closed over."""
        closure = [number is not None or at in self._literals for at, number in enumerate(self._of_host)]
        return [*closure, *(True for _ in self.kinds)]

    def __iter__(self) -> Iterator[Answer]:
        return (answer for answers in self._found.values() for answer in answers)

    def add(
        self,
        host: HostPart,
        numbers: Mapping[Place, Number],
        literals: Mapping[int, torch.Tensor],
        reads: Guard | None,
    ) -> None:
        """Serve the answers of one more capture, with these numbers and literals."""
        if self.num == MOST:
            first = next(iter(self))
            self._found, self.num = {first.host.first: [first]}, 1
        held = {at: literals[at] for at in self._literals}
        closed = (held.get(at) if number is None else number for at, number in enumerate(self._of_host))
        given = *(value for value in closed if value is not None), *vectors(numbers, self.kinds)
        own = {place: numbers[place] for places in self.kinds.values() for place in places}
        self._found.setdefault(host.first, []).append(Answer(host, given, own, held, reads))
        self.num += 1

    def take(self, others: "Answers", outline: GraphOutline, reads: Guard | None) -> None:
        """Serve those of another capture too, of this outline: there may be several, as other steps have it too."""
        known = {id(answer.host) for answer in self}
        for answer in [answer for answer in others if id(answer.host) not in known]:
            self.add(answer.host, outline.numbers, outline.literals, answer.reads or reads)

    def run(self, inputs: HostInputs) -> GivenInputs | Mismatch:
        """What the program is given; or what has another value than it serves."""
        if not self.num:
            return GivenInputs([], {})
        first = next(iter(self))
        likely = [first] if self.num == 1 else self._found.get(first.host.first_now(inputs), [])
        for answer in list(likely):
            if answer.reads is not None and answer.reads.changed() is not None:
                likely.remove(answer)
                self.num -= 1
            elif not isinstance(found := answer.run(inputs), Mismatch):
                return found
        return first.run(inputs)

    def wider(self, outline: GraphOutline, differences: tuple[set[Place], set[int]]) -> "Answers":
        """The same answers, with these numbers and literals as inputs too; itself if they are."""
        before = {place for places in self.kinds.values() for place in places}
        places, literals = before | differences[0], self._literals | differences[1]
        if (places, literals) == (before, self._literals):
            return self
        wider = Answers(self._captured, split_kinds(outline.numbers, places), literals)
        for answer in self:
            numbers = {**outline.numbers, **answer.numbers}
            wider.add(answer.host, numbers, {**outline.literals, **answer.literals}, answer.reads)
        return wider


def outline_of_loss(graph: Captured[LossShape], calls: Mapping[int, Call], others: ModuleFlags) -> GraphOutline:
    """The outline of a captured loss: two that differ in numbers alone are one program."""
    order = {number: position for position, number in enumerate(calls)}
    given = {id(tensor): number for number, tensor in enumerate(graph.host.given)} if graph.host else {}
    outline, shape = outline_of(graph, given, order), graph.aux
    regions: dict[int, int] = {}
    closed = [*outline.closed]
    about = (
        *(tuple(part) for part in (shape.inputs, shape.grads, shape.buffers, shape.without_grad)),
        shape.metrics,
        tuple((id(ref()), flag) for ref, flag in others),
        tuple((name, bits_of(value), persistent) for name, value, persistent in graph.changed.made_buffers()),
        tuple(map(id, graph.graded)),
        tuple(_call(call, regions, order, closed) for call in calls.values()),
    )
    return dataclasses.replace(outline, skeleton=(outline.skeleton, about), closed=tuple(closed))


def _call(call: Call, regions: dict[int, int], order: Mapping[int, int], closed: list[torch.Tensor]) -> Hashable:
    """A call of a repeated layer; what a region is stands at its first, and what it closes over is added."""
    is_first, region = id(call.region) not in regions, call.region
    about: Hashable = None
    if is_first:
        outline = outline_of(region.graph, {}, order)
        closed += outline.closed
        about = (
            *(outline.skeleton, repr(outline.numbers), tuple(map(bits_of, outline.literals.values()))),
            *(region.group.path, region.number, tuple(region.inputs), tuple(map(bits_of, region.constants))),
            *(region.num_results, tuple(region.gradients), tuple(region.rules.items()), region.num_draws),
            *(tuple(region.differentiable), region.used, region.remat),
        )
    number = regions.setdefault(id(region), len(regions))
    bundles = tuple(call.bundles.items())
    return number, about, call.path, call.place, tuple(call.arguments), bundles, call.number, call.used
