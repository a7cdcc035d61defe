"""Values that Python asks for: what the host has of them before a step, and the answers that one program serves.

They may be of the batch or of buffers. The loss is captured anew for each new answer, so that whatever Python does with
a number (`if at + n > size:`) is right by construction. Where that capture differs from an earlier one in numbers
alone, these become inputs of one program, which is compiled once. So the position in a queue may take any number of
values.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import torch

from torch_shard._capture import Captured, Guard, HostInputs, HostPart, Mismatch, ModuleFlags, bits_of
from torch_shard._common.convert import to_host
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._loss.batch import BatchSignature
from torch_shard._loss.joint import LossShape
from torch_shard._lowering import GraphOutline, Kind, Number, Place, outline_of, split_kinds, vectors
from torch_shard._scan import Call, Region
from torch_shard._sharding import Stacks
from torch_shard._state import TrainState

T = TypeVar("T")
Buffer = Callable[[str], torch.Tensor]
Split = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor]]]


# ---- what the host has before a step ----


def _whole(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(tensors)]


class HostValues:
    """The batch and the buffers of one call of a step.

    Args:
        leaves: The array leaves of the batch.
        signature: Of the batch.
        buffer: Gives a buffer by name.
        num: Number of microbatches.
        split: Splits the leaves into microbatches.
        local: Whether each process has the rows of its own devices alone.
    """

    def __init__(
        self,
        leaves: Sequence[PyTree],
        signature: BatchSignature,
        buffer: Buffer,
        *,
        num: int = 1,
        split: Split = _whole,
        local: bool = False,
    ) -> None:
        self._leaves = leaves
        self._signature = signature
        self._buffer = buffer
        self.num = num
        self._split = split
        self._missing = _why_missing(leaves, local)

        # By microbatch: what those before it have made of buffers.
        self._later = dict[int, Mapping[str, torch.Tensor]]()

    @functools.cached_property
    def _microbatches(self) -> list[list[torch.Tensor]]:
        """The leaves of each microbatch."""
        leaves: list[torch.Tensor] = []
        for leaf, spec in zip(self._leaves, self._signature.specs, strict=True):
            tensor = to_cpu(leaf).detach()
            leaves.append(tensor.to(spec.dtype))
        return self._split(leaves)

    def of(self, number: int = 0) -> HostInputs:
        """What a microbatch has."""
        later = self._later.get(number, {})

        def buffer(name: str) -> torch.Tensor:
            return later[name] if name in later else self._buffer(name)

        return HostInputs(
            batch=lambda leaf: self._microbatches[number][leaf],
            buffer=buffer,
            paths=lambda: self._signature.paths,
            missing=self._missing,
            goes_on=self.num > 1,
        )

    def note_later(self, number: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """Note what a microbatch makes of buffers: the next one has these."""
        self._later[number + 1] = {**self._later.get(number, {}), **buffers}


class HostBuffers:
    """Buffers of states on the host, each read once as long as it stays what it is: reading waits for the last step.

    Args:
        model_buffers: Those of the model.
    """

    def __init__(self, model_buffers: Mapping[str, torch.Tensor]) -> None:
        self._model_buffers = model_buffers

        # The stored array that a value was read from, and the value. An array never changes, so it says if that is old.
        self._read: dict[str, tuple[jax.Array, torch.Tensor]] = {}

    def value(self, state: TrainState, name: str) -> torch.Tensor:
        """The value of a buffer; that of the model's own where there are no values of a state."""
        model_buffer = self._model_buffers[name]
        array = _stored_array(state, name)

        # The arrays of a donated state are deleted, and those of a state of shapes are none.
        if not isinstance(array, jax.Array) or array.is_deleted():
            return model_buffer

        known = self._read.get(name)
        if known is None or known[0] is not array:
            known = array, to_host(state.buffers[name]).to(model_buffer.dtype)
            self._read[name] = known
        return known[1]

    def note_kept(self, names: Sequence[str], state: TrainState) -> None:
        """Note the state after a step that has left these buffers as they were."""
        for name in names:
            if name in self._read:
                _, value = self._read[name]
                self._read[name] = _stored_array(state, name), value


def _stored_array(state: TrainState, name: str) -> Any:
    """The array in which a buffer is stored: a stack, where it is a row of one."""
    row = state.buffers.row(name) if isinstance(state.buffers, Stacks) else None
    return state.buffers[name] if row is None else row[0]


def own_copy(leaf: Any) -> Any:
    """A leaf of a batch that nobody else writes to."""
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _why_missing(leaves: Sequence[Any], local: bool) -> str | None:
    if local:
        return (
            "of which each process has the rows of its own devices alone (local_batches=True). Give each process the "
            "whole batch, or compute the value before the step and pass it as data: a number in the batch."
        )
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "is_meta", False):
            return "of which only shapes were given. Give a batch with values."
    return None


def capture_with(host: HostInputs, capture: Callable[[], T]) -> T:
    """Capture, and again where that fails and sizes that depend on the batch could have been asked for."""
    try:
        return capture()
    except NotImplementedError:
        if not host.missed:
            raise

    # A program with sizes as answers serves one size alone, so that it comes second to a selection by masks.
    host.sizes = True
    return capture()


# ---- the answers that a program serves ----


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
        inputs: The further inputs of the program: results of the host by number, and tensors that stay as they are.
        numbers: Of the graph, where they are inputs.
        literals: Tensors of Python's numbers, where they are, by their position in the closure.
        reads: What the capture has read, if that is not what the program's own has.
    """

    host: HostPart
    inputs: tuple[int | torch.Tensor, ...]
    numbers: Mapping[Place, Number]
    literals: Mapping[int, torch.Tensor]
    reads: Guard | None

    def run(self, inputs: HostInputs) -> GivenInputs | Mismatch:
        """What the program is given, or what has another value now."""
        results = self.host.run(self.host.read(inputs), inputs)
        if isinstance(results, Mismatch):
            return results

        tensors = [results[value] if isinstance(value, int) else value for value in self.inputs]
        return GivenInputs(tensors, self.host.later)


class Answers:
    """The answers that a program serves; its further inputs follow the order of what it closes over.

    Args:
        captured: The capture that the program is of.
        kinds: The places in its graph whose numbers are inputs.
        literals: Positions in its closure of the tensors that are inputs.
    """

    def __init__(
        self,
        captured: Captured[Any],
        kinds: Mapping[Kind, list[Place]] | None = None,
        literals: Collection[int] = (),
    ) -> None:
        self._captured = captured
        self.kinds = kinds or {}
        self._literals = frozenset(literals)

        # For each tensor of the closure, which result of the host it is; None for others.
        host = captured.host
        result_of = {id(tensor): number for number, tensor in enumerate(host.given)} if host else {}
        self._host_results = [result_of.get(id(tensor)) for tensor in captured.closure]

        # By the answer to the first question, which depends on no other: a program of thousands finds its answer so.
        self._by_first_answer: dict[Hashable, list[Answer]] = {}
        self.num = 0
        """How many there are."""
        if host is not None and not self.kinds and not literals:
            self.add(host, {}, {}, None)

    @property
    def are_given(self) -> list[bool]:
        """Of the last inputs of the graph, which are given with each call; the others are closed over."""
        closure = [result is not None or at in self._literals for at, result in enumerate(self._host_results)]
        return closure + [True] * len(self.kinds)

    def __iter__(self) -> Iterator[Answer]:
        for answers in self._by_first_answer.values():
            yield from answers

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
            self._by_first_answer = {first.host.first: [first]}
            self.num = 1

        literals = {at: literals[at] for at in self._literals}
        inputs: list[int | torch.Tensor] = []
        for at, result in enumerate(self._host_results):
            if result is not None:
                inputs.append(result)
            elif at in literals:
                inputs.append(literals[at])
        inputs += vectors(numbers, self.kinds)

        numbers = {place: numbers[place] for places in self.kinds.values() for place in places}
        answer = Answer(host, tuple(inputs), numbers, literals, reads)
        self._by_first_answer.setdefault(host.first, []).append(answer)
        self.num += 1

    def take(self, others: "Answers", outline: GraphOutline, reads: Guard | None) -> None:
        """Serve those of another capture too, of this outline: there may be several, as other steps have it too."""
        known = {id(answer.host) for answer in self}
        new = [answer for answer in others if id(answer.host) not in known]
        for answer in new:
            self.add(answer.host, outline.numbers, outline.literals, answer.reads or reads)

    def run(self, inputs: HostInputs) -> GivenInputs | Mismatch:
        """What the program is given; or what has another value than it serves."""
        if not self.num:
            return GivenInputs([], {})

        first = next(iter(self))
        likely = [first]
        if self.num > 1:
            likely = self._by_first_answer.get(first.host.first_now(inputs), [])

        for answer in list(likely):
            # What this one capture has read is another value now: its answer is that of an outdated program.
            if answer.reads is not None and answer.reads.changed() is not None:
                likely.remove(answer)
                self.num -= 1
                continue

            given = answer.run(inputs)
            if not isinstance(given, Mismatch):
                return given
        return first.run(inputs)

    def wider(self, outline: GraphOutline, differences: tuple[set[Place], set[int]]) -> "Answers":
        """The same answers, with these numbers and literals as inputs too; itself if they are."""
        before = {place for places in self.kinds.values() for place in places}
        places = before | differences[0]
        literals = self._literals | differences[1]
        if places == before and literals == self._literals:
            return self

        wider = Answers(self._captured, split_kinds(outline.numbers, places), literals)
        for answer in self:
            numbers = {**outline.numbers, **answer.numbers}
            wider.add(answer.host, numbers, {**outline.literals, **answer.literals}, answer.reads)
        return wider


# ---- which captures of a loss differ in numbers alone ----


def outline_of_loss(graph: Captured[LossShape], calls: Mapping[int, Call], others: ModuleFlags) -> GraphOutline:
    """The outline of a captured loss: two that differ in numbers alone are one program.

    Args:
        graph: The captured loss.
        calls: The calls of repeated layers in it.
        others: Modules beside the model, with their training flags.
    """
    # Another capture has other numbers for its calls.
    order = {number: position for position, number in enumerate(calls)}
    results = graph.host.given if graph.host else []
    outline = outline_of(graph, {id(tensor): number for number, tensor in enumerate(results)}, order)

    regions: dict[int, int] = {}
    closed = list(outline.closed)
    calls_outlined = tuple(_outline_of_call(call, regions, order, closed) for call in calls.values())

    shape = graph.aux
    about = (
        tuple(shape.inputs),
        tuple(shape.grads),
        tuple(shape.buffers),
        tuple(shape.without_grad),
        shape.metrics,
        tuple((id(ref()), flag) for ref, flag in others),
        tuple((name, bits_of(value), persistent) for name, value, persistent in graph.changed.made_buffers()),
        tuple(map(id, graph.graded)),
        calls_outlined,
    )
    return dataclasses.replace(outline, skeleton=(outline.skeleton, about), closed=tuple(closed))


def _outline_of_call(
    call: Call, regions: dict[int, int], order: Mapping[int, int], closed: list[torch.Tensor]
) -> Hashable:
    """A call of a repeated layer.

    Args:
        call: The call.
        regions: Numbers of the regions that were met so far, by `id`.
        order: Positions of calls by their numbers in the graph.
        closed: Takes what a new region closes over.
    """
    region = call.region
    region_outline: Hashable = None
    if id(region) not in regions:
        regions[id(region)] = len(regions)
        region_outline = _outline_of_region(region, order, closed)

    bundles = tuple(call.bundles.items())
    arguments = tuple(call.arguments)
    return regions[id(region)], region_outline, call.path, call.place, arguments, bundles, call.number, call.used


def _outline_of_region(region: Region, order: Mapping[int, int], closed: list[torch.Tensor]) -> Hashable:
    outline = outline_of(region.graph, {}, order)
    closed += outline.closed
    return (
        outline.skeleton,
        # These cannot become inputs: all calls of the region have them, and a loop runs it once.
        repr(outline.numbers),
        tuple(map(bits_of, outline.literals.values())),
        region.group.path,
        region.number,
        tuple(region.inputs),
        tuple(map(bits_of, region.constants)),
        region.num_results,
        tuple(region.gradients),
        tuple(region.rules.items()),
        region.num_draws,
        tuple(region.differentiable),
        region.used,
        region.remat,
    )
