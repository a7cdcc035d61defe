"""A module with a torch loss as one captured program: loss, metrics, gradients and new buffers of named tensors."""

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch

from torch_shard._capture import HostPart, Mismatch
from torch_shard._common.caller import caller
from torch_shard._common.fx import outputs_of
from torch_shard._common.random import Key
from torch_shard._common.types import PyTree
from torch_shard._loss.answers import Answers, HostValues
from torch_shard._loss.captured import CapturedLoss
from torch_shard._loss.joint import LossShape
from torch_shard._lowering import (
    ConstrainedValues,
    Program,
    RowSplit,
    compiler_options,
    constrained_values,
    find_written_out,
    report_attention,
    report_context,
    report_experts,
    report_own,
)
from torch_shard._scan import Bundle, GraphInput, RolledLoss, StackRow, StackRows, array_of, names_of, report
from torch_shard._sharding import Kept, Stacks

logger = logging.getLogger(__name__)


def in_program(tensors: Mapping[str, jax.Array], name: str) -> jax.Array:
    """An entry as a program takes it: in pieces, if it is kept so."""
    return tensors.in_program(name) if isinstance(tensors, Stacks) else tensors[name]


def forms_of(tensors: Mapping[str, jax.Array]) -> dict[str, Kept]:
    """Those of entries whose gradients a program gives in pieces."""
    forms = tensors.forms if isinstance(tensors, Stacks) else {}
    return {name: form for name, form in forms.items() if form.cut is not None}


class LossInputs:
    """The inputs of a loss program by number: named tensors and bundles of them, then the batch and the closure."""

    def __init__(self, named: list[GraphInput], tensors: Mapping[str, jax.Array], others: list[jax.Array]) -> None:
        self._named, self._tensors, self._others = named, tensors, others
        self._stacks: dict[int, jax.Array] = {}

    def _name(self, at: tuple[int, ...]) -> str | None:
        number, *member = at
        given = self._named[number] if number < len(self._named) else None
        return given.names[member[0]] if isinstance(given, Bundle) else given

    def __getitem__(self, at: tuple[int, ...]) -> jax.Array:
        name = self._name(at)
        if name is None:
            return self._others[at[0] - len(self._named)]
        return in_program(self._tensors, name)

    def of(self, others: list[jax.Array]) -> "LossInputs":
        """The same with another batch and closure."""
        other = copy.copy(self)
        other._others = others
        return other

    def all(self) -> list[jax.Array]:
        return [self[number,] for number in range(len(self._named) + len(self._others))]

    def row(self, at: tuple[int, ...]) -> StackRow | None:
        """The stack of which an input is a row, if it is one."""
        name = self._name(at)
        if name is None or not isinstance(self._tensors, Stacks):
            return None
        found = self._tensors.row(name)
        if found is None or (form := self._tensors.layout.forms.get(name)) is None:
            return None if found is None else StackRow(*found)
        stack, row = found
        if id(stack) not in self._stacks:
            self._stacks[id(stack)] = form.in_program(stack, is_stack=True)
        return StackRow(self._stacks[id(stack)], row)


@dataclasses.dataclass(frozen=True)
class LossOutputs:
    """Results of a loss program, as arrays by name."""

    loss: jax.Array
    metrics: dict[str, PyTree]
    grads: Mapping[str, jax.Array]
    buffers: Mapping[str, jax.Array]
    written: Mapping[str, jax.Array]
    """Parameters that forward wrote in place."""


@dataclasses.dataclass(frozen=True, eq=False)
class LossProgram:
    """A captured loss: `run(key, tensors by name, batch arrays, closure arrays) -> LossOutputs`.

    Attributes:
        captured: The capture that it is of.
        program: Its graph, which may have numbers as inputs.
        rolled: Its loops, with a choice of what the backward pass computes again; None without repeated layers.
        answers: Those to Python's questions that it serves.
        rows: The axes over which rows of the batch are kept split.
    """

    captured: CapturedLoss
    program: Program[LossShape]
    rolled: RolledLoss | None
    answers: Answers
    rows: RowSplit | None = None

    @classmethod
    def of(cls, captured: CapturedLoss, rows: RowSplit | None) -> "LossProgram":
        """The program of a capture as it is."""
        return cls(captured, captured.program, captured.rolled, captured.answers, rows)

    @property
    def inputs(self) -> list[GraphInput]:
        """The first inputs of its graph: entries by name, and bundles of them."""
        return self.program.graph.aux.inputs

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return self.program.random if self.rolled is None else self.rolled.random

    @property
    def _graphs(self) -> list[tuple[str, torch.fx.GraphModule]]:
        """Its graph, and those of the repeated layers as often as they run; each with the path of its module."""
        return [("", self.program.graph.module), *(self.rolled.graphs if self.rolled else ())]

    @functools.cached_property
    def report(self) -> list[str]:
        """Lines that say which layers are loops, and how attention, experts and the user's own functions run."""
        lines = [*report(self.captured.groups, self.rolled), *report_own(graph for _, graph in self._graphs)]
        if self.rows is not None:
            for make in (report_context, report_attention, report_experts):
                lines += make(self._graphs, self.rows)
        return lines

    def look_again(self, values: HostValues) -> None:
        """Capture the loss once more, and refuse it if it is another one now.

        What carries numbers is captured anew for each.
        """
        if self.answers.num <= 1 and not self.answers.kinds:
            self.captured.look_again(values)

    def carrying(self, other: "LossProgram") -> "LossProgram | None":
        """A program for what this one and another capture are for, maybe this one; None if numbers are not all."""
        outline, theirs = self.captured.outline, other.captured.outline
        is_asked = self.answers.num and other.answers.num
        if not is_asked or (found := outline.differences(theirs)) is None:
            return None
        if self.captured.effects.agreed(other.captured.effects) is None:
            return None
        self.captured.take_effects(other.captured)
        answers, program = self.answers.wider(outline, found), self
        if answers is not self.answers:
            graph = self.captured.program.carrying(answers.kinds)
            rolled = None if self.rolled is None else self.rolled.of(graph)
            program = dataclasses.replace(self, answers=answers, program=graph, rolled=rolled)
        answers.take(other.answers, theirs, self.captured.reads_beside(other.captured))
        return program

    def with_remat(self, remat: str) -> "LossProgram":
        """The same program, with another choice of what is computed again in the backward pass."""
        return dataclasses.replace(self, rolled=None if self.rolled is None else self.rolled.with_remat(remat))

    @functools.cached_property
    def constraints(self) -> ConstrainedValues:
        """The values that it lays out on the mesh, and why."""
        return constrained_values(self._graphs, self.rows)

    @property
    def written_out(self) -> list[str]:
        """The modules that write attention out over a sequence that is split."""
        return find_written_out(self._graphs)

    @property
    def host(self) -> HostPart | None:
        """What is computed on the host before each call, as Python asks for values."""
        return self.program.graph.host

    @property
    def reads_batch(self) -> bool:
        """Whether Python has asked for values of the batch."""
        return self.host is not None and self.host.reads_batch

    def fit(self, values: HostValues) -> list[torch.Tensor] | Mismatch:
        """Ask again for the values that the program was made for.

        Returns:
            Further inputs, stacked if there are microbatches; or what has another value.
        """
        found: list[list[torch.Tensor]] = []
        for number in range(values.num):
            answer = self.answers.run(values.of(number))
            if isinstance(answer, Mismatch):
                return dataclasses.replace(answer, microbatch=number)
            values.note_later(number, answer.later)
            found.append(answer.inputs)
        return found[0] if len(found) == 1 else [torch.stack(parts) for parts in zip(*found, strict=True)]

    @property
    def num_given(self) -> int:
        """Number of inputs that are computed on the host from the batch, or are numbers; they follow it."""
        return sum(self.answers.are_given)

    @property
    def closure(self) -> tuple[torch.Tensor, ...]:
        """What it closes over; literals that differ by answer are given."""
        return tuple(
            t for t, given in zip(self.program.graph.closure, self.answers.are_given, strict=False) if not given
        )

    @property
    def asked(self) -> list[str]:
        """Buffers whose values the program depends on."""
        return self.host.buffers if self.host else []

    @functools.cached_property
    def kept(self) -> tuple[str, ...]:
        """Those of `asked` that the program leaves as they are."""
        shape, graph = self.program.graph.aux, self.program.graph
        outputs = outputs_of(graph.module.graph)[1 + len(shape.grads) :]
        inputs = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
        kept = [n for n, out in zip(shape.buffers, outputs, strict=False) if out is inputs[self.inputs.index(n)]]
        return tuple(name for name in self.asked if name in kept and name not in self.written)

    @property
    def without_grad(self) -> tuple[str, ...]:
        """Trainable parameters that the loss does not reach; torch leaves their `.grad` None."""
        shape = self.program.graph.aux
        whole = [name for given in shape.without_grad for name in names_of(given)]
        return (*whole, *(() if self.rolled is None else self.rolled.without(shape.grads)))

    @property
    def grads(self) -> list[str]:
        """Parameters that `run` gives gradients of."""
        return [name for given in self.program.graph.aux.grads for name in names_of(given)]

    @property
    def buffers(self) -> list[str]:
        """Buffers, as `run` gives them."""
        return self.program.graph.aux.buffers

    @property
    def written(self) -> list[str]:
        """Names of the parameters and buffers that forward writes in place."""
        found = (self.inputs[at] for at in self.program.graph.written if at < len(self.inputs))
        return [name for name in found if isinstance(name, str)]

    def compiler_options(self, mesh: jax.sharding.Mesh) -> dict[str, str | int | bool] | None:
        """XLA options for the program on these devices."""
        return compiler_options([graph for _, graph in self._graphs], mesh)

    def run(
        self,
        key: Key,
        tensors: Mapping[str, jax.Array],
        batch: Sequence[jax.Array],
        closure: Sequence[jax.Array],
    ) -> LossOutputs:
        """To be traced by JAX; the further inputs of `fit` follow the batch."""
        inputs = LossInputs(self.inputs, tensors, self.extra_inputs(batch, closure))
        if self.rolled is None:
            outputs = self.program.run(key, *inputs.all(), split=self.rows)
        else:
            outputs = self.rolled.run(key, inputs, self.rows)
        shape, graph = self.program.graph.aux, self.program.graph
        loss, *rest = outputs[: graph.num_outputs]
        by_name, rest = self.by_name(rest, tensors), rest[len(shape.grads) :]
        buffers, metrics = rest[: len(shape.buffers)], rest[len(shape.buffers) :]
        written = dict(zip(self.written, outputs[graph.num_outputs :], strict=False))
        return LossOutputs(
            loss=array_of(loss),
            metrics=jax.tree.unflatten(shape.metrics, map(array_of, metrics)),
            grads=StackRows(by_name, forms_of(tensors)),
            buffers=StackRows(zip(shape.buffers, buffers, strict=True)),
            written=StackRows(written),
        )

    def extra_inputs(self, batch: Sequence[jax.Array], closure: Sequence[jax.Array]) -> list[jax.Array]:
        """The inputs of the graph that follow those of the model: leaves, what the host has computed, the closure."""
        num_rows = len(batch) - self.num_given
        given, others = iter(batch[num_rows:]), iter(closure)
        met = [next(given if is_given else others) for is_given in self.answers.are_given]
        return [*batch[:num_rows], *met]

    def by_name(self, grads: Sequence[Any], tensors: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Gradients, those of bundles by member."""
        found: dict[str, Any] = {}
        for given, grad in zip(self.program.graph.aux.grads, grads, strict=False):
            if isinstance(given, str):
                found[given] = grad
            else:
                members = cast(list[Any], grad) if isinstance(grad, list) else [None] * len(given.names)
                found |= zip(given.names, members, strict=True)
        return {n: jnp.zeros_like(in_program(tensors, n)) if grad is None else grad for n, grad in found.items()}


MANY = 16
"""So many answers of one program that a warning tells of them."""


def program_for(
    programs: Iterable[LossProgram], values: HostValues, capture: Callable[[int], LossProgram]
) -> LossProgram:
    """The program for these values: one of those there are, one that is more general than one of them, or a new one."""
    capture = functools.cache(capture)
    for program in programs:
        found = _serving(program, values, capture)
        if not isinstance(found, Mismatch):
            return found
    found = _serving(capture(0), values, capture)
    if isinstance(found, Mismatch):
        raise NotImplementedError(
            f"{caller()}: {found} in microbatch {found.microbatch} of the same batch, and one program runs all of "
            "them. Use accumulate_steps=1, pad to one size, or pass the value as data."
        )
    return found


def _serving(program: LossProgram, values: HostValues, capture: Callable[[int], LossProgram]) -> LossProgram | Mismatch:
    """A program that serves these values and what this one serves; or what needs another one."""
    seen = set[int]()
    while isinstance(found := program.fit(values), Mismatch):
        if found.microbatch in seen:  # a buffer, or the batch, that is being written to
            raise NotImplementedError(f"{caller()}: {found}, while it was captured. Ask for what nobody writes to.")
        seen.add(found.microbatch)
        start = time.perf_counter()
        if (wider := program.carrying(capture(found.microbatch))) is None:
            return found
        if wider is program:
            _tell(found, program.answers.num, time.perf_counter() - start)
        program = wider
    return program


def _tell(found: Mismatch, number: int, seconds: float) -> None:
    """Say once that a program is traced again and again."""
    logger.log(
        logging.WARNING if number == MANY else logging.DEBUG,
        "%s: %s. This is value %d: the loss is captured again for each (%.1f s), and nothing is compiled; a value that "
        "comes back costs nothing. Where it never does, work on it as a tensor, or pass it as data, in the batch.",
        caller(),
        found,
        number,
        seconds,
    )
