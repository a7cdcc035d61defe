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
        self._named = named
        self._tensors = tensors
        self._others = others

        # Stacks in the form in which a program takes them, by `id` of the stored one: many rows ask for the same.
        self._stacks: dict[int, jax.Array] = {}

    def _name(self, at: tuple[int, ...]) -> str | None:
        """The name of an input of the model; None of the batch and the closure."""
        number, *member = at
        if number >= len(self._named):
            return None
        graph_input = self._named[number]
        return graph_input.names[member[0]] if isinstance(graph_input, Bundle) else graph_input

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

        stack_and_row = self._tensors.row(name)
        if stack_and_row is None:
            return None
        form = self._tensors.layout.forms.get(name)
        if form is None:
            return StackRow(*stack_and_row)

        stack, row = stack_and_row
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
        if not self.answers.num or not other.answers.num:
            return None
        outline = self.captured.outline
        other_outline = other.captured.outline
        differences = outline.differences(other_outline)
        if differences is None:
            return None
        if self.captured.effects.agreed(other.captured.effects) is None:
            return None

        self.captured.take_effects(other.captured)
        program = self
        answers = self.answers.wider(outline, differences)
        if answers is not self.answers:
            graph = self.captured.program.carrying(answers.kinds)
            rolled = None if self.rolled is None else self.rolled.of(graph)
            program = dataclasses.replace(self, answers=answers, program=graph, rolled=rolled)
        answers.take(other.answers, other_outline, self.captured.reads_beside(other.captured))
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
        by_microbatch: list[list[torch.Tensor]] = []
        for number in range(values.num):
            answer = self.answers.run(values.of(number))
            if isinstance(answer, Mismatch):
                return dataclasses.replace(answer, microbatch=number)

            # The next microbatch reads the buffers that this one leaves.
            values.note_later(number, answer.later)
            by_microbatch.append(answer.inputs)

        if len(by_microbatch) == 1:
            return by_microbatch[0]
        return [torch.stack(inputs) for inputs in zip(*by_microbatch, strict=True)]

    @property
    def num_given(self) -> int:
        """Number of inputs that are computed on the host from the batch, or are numbers; they follow it."""
        return sum(self.answers.are_given)

    @property
    def closure(self) -> tuple[torch.Tensor, ...]:
        """What it closes over; literals that differ by answer are given."""
        # The flags go on after the closure, for numbers.
        pairs = zip(self.program.graph.closure, self.answers.are_given, strict=False)
        return tuple(tensor for tensor, is_given in pairs if not is_given)

    @property
    def asked(self) -> list[str]:
        """Buffers whose values the program depends on."""
        return self.host.buffers if self.host else []

    @functools.cached_property
    def kept(self) -> tuple[str, ...]:
        """Those of `asked` that the program leaves as they are."""
        graph = self.program.graph.module.graph
        new_buffers = outputs_of(graph)[1 + len(self.program.graph.aux.grads) :]
        inputs = graph.find_nodes(op="placeholder")

        unchanged: set[str] = set()
        for name, new in zip(self.buffers, new_buffers, strict=False):
            if new is inputs[self.inputs.index(name)]:
                unchanged.add(name)
        return tuple(name for name in self.asked if name in unchanged and name not in self.written)

    @property
    def without_grad(self) -> tuple[str, ...]:
        """Trainable parameters that the loss does not reach; torch leaves their `.grad` None."""
        shape = self.program.graph.aux
        names: list[str] = []
        for graph_input in shape.without_grad:
            names += names_of(graph_input)
        if self.rolled is not None:
            names += self.rolled.without(shape.grads)
        return tuple(names)

    @property
    def grads(self) -> list[str]:
        """Parameters that `run` gives gradients of."""
        return [name for graph_input in self.program.graph.aux.grads for name in names_of(graph_input)]

    @property
    def buffers(self) -> list[str]:
        """Buffers, as `run` gives them."""
        return self.program.graph.aux.buffers

    @property
    def written(self) -> list[str]:
        """Names of the parameters and buffers that forward writes in place."""
        written = [self.inputs[at] for at in self.program.graph.written if at < len(self.inputs)]
        return [name for name in written if isinstance(name, str)]

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

        # The outputs of the graph: the loss, gradients, buffers, metrics, and new values of inputs written in place.
        shape = self.program.graph.aux
        num_outputs = self.program.graph.num_outputs
        buffers_at = 1 + len(shape.grads)
        metrics_at = buffers_at + len(shape.buffers)
        grads = outputs[1:buffers_at]
        buffers = outputs[buffers_at:metrics_at]
        metrics = outputs[metrics_at:num_outputs]
        written = dict(zip(self.written, outputs[num_outputs:], strict=False))
        return LossOutputs(
            loss=array_of(outputs[0]),
            metrics=jax.tree.unflatten(shape.metrics, map(array_of, metrics)),
            grads=StackRows(self.by_name(grads, tensors), forms_of(tensors)),
            buffers=StackRows(zip(shape.buffers, buffers, strict=True)),
            written=StackRows(written),
        )

    def extra_inputs(self, batch: Sequence[jax.Array], closure: Sequence[jax.Array]) -> list[jax.Array]:
        """The inputs of the graph that follow those of the model: leaves, what the host has computed, the closure."""
        num_leaves = len(batch) - self.num_given
        computed_on_host = iter(batch[num_leaves:])
        closed_over = iter(closure)
        inputs = list(batch[:num_leaves])
        for is_given in self.answers.are_given:
            inputs.append(next(computed_on_host if is_given else closed_over))
        return inputs

    def by_name(self, grads: Sequence[Any], tensors: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Gradients, those of bundles by member."""
        by_name: dict[str, Any] = {}
        for graph_input, grad in zip(self.program.graph.aux.grads, grads, strict=True):
            if isinstance(graph_input, str):
                by_name[graph_input] = grad
            else:
                # Of a bundle that no call of its layer used, autograd gives one zero for all members.
                members = cast(list[Any], grad) if isinstance(grad, list) else [None] * len(graph_input.names)
                by_name |= zip(graph_input.names, members, strict=True)

        for name, grad in by_name.items():
            if grad is None:
                by_name[name] = jnp.zeros_like(in_program(tensors, name))
        return by_name


MANY = 16
"""So many answers of one program that a warning tells of them."""


def program_for(
    programs: Iterable[LossProgram], values: HostValues, capture: Callable[[int], LossProgram]
) -> LossProgram:
    """The program for these values: one of those there are, one that is more general than one of them, or a new one."""
    capture = functools.cache(capture)  # several programs may be tried before one is found to be wider
    for program in programs:
        serving = _serving(program, values, capture)
        if not isinstance(serving, Mismatch):
            return serving

    serving = _serving(capture(0), values, capture)
    if isinstance(serving, Mismatch):
        raise NotImplementedError(
            f"{caller()}: {serving} in microbatch {serving.microbatch} of the same batch, and one program runs all of "
            "them. Use accumulate_steps=1, pad to one size, or pass the value as data."
        )
    return serving


def _serving(program: LossProgram, values: HostValues, capture: Callable[[int], LossProgram]) -> LossProgram | Mismatch:
    """A program that serves these values and what this one serves; or what needs another one."""
    captured = set[int]()
    while True:
        mismatch = program.fit(values)
        if not isinstance(mismatch, Mismatch):
            return program

        # A capture for this very microbatch does not serve it: the buffer, or the batch, is being written to.
        if mismatch.microbatch in captured:
            raise NotImplementedError(f"{caller()}: {mismatch}, while it was captured. Ask for what nobody writes to.")
        captured.add(mismatch.microbatch)

        start = time.perf_counter()
        wider = program.carrying(capture(mismatch.microbatch))
        if wider is None:
            return mismatch
        if wider is program:
            _warn_of_captures(mismatch, program.answers.num, time.perf_counter() - start)
        program = wider


def _warn_of_captures(mismatch: Mismatch, number: int, seconds: float) -> None:
    """Say once that a program is traced again and again."""
    logger.log(
        logging.WARNING if number == MANY else logging.DEBUG,
        "%s: %s. This is value %d: the loss is captured again for each (%.1f s), and nothing is compiled; a value that "
        "comes back costs nothing. Where it never does, work on it as a tensor, or pass it as data, in the batch.",
        caller(),
        mismatch,
        number,
        seconds,
    )
