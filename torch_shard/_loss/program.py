"""A module with a torch loss as one captured program: loss, metrics, gradients and new buffers of named tensors."""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._capture import (
    Guard,
    HostInputs,
    HostPart,
    MetricCall,
    Mismatch,
    ModuleFlags,
    flags_hold,
    made_buffers,
    module_roots,
)
from torch_shard._common.fx import outputs_of
from torch_shard._common.pieces import whole
from torch_shard._common.random import Key
from torch_shard._common.types import PyTree
from torch_shard._loss.carried import Answers, outline_of_loss
from torch_shard._loss.host_values import HostValues
from torch_shard._loss.inputs import LossInputs
from torch_shard._loss.joint import LossShape
from torch_shard._lowering import (
    GraphOutline,
    RowSplit,
    compiler_options,
    find_written_out,
    report_attention,
    report_context,
    report_experts,
    report_own,
    rows_split,
)
from torch_shard._scan import (
    CapturedLayers,
    StackRows,
    array_of,
    names_of,
    report,
)


@dataclasses.dataclass(frozen=True)
class LossOutputs:
    """Results of a loss program, as arrays by name."""

    loss: jax.Array
    metrics: dict[str, PyTree]
    grads: Mapping[str, jax.Array]
    buffers: Mapping[str, jax.Array]
    written: Mapping[str, jax.Array]
    """Parameters that forward wrote in place."""


class LossProgram:
    """A captured loss: `run(key, tensors by name, batch arrays, closure arrays) -> LossOutputs`."""

    def __init__(
        self,
        captured: CapturedLayers[LossShape],
        model: torch.nn.Module,
        reads: Guard,
        look_again: "Callable[[LossProgram, HostInputs], None]",
    ) -> None:
        program, rolled, self.groups = captured
        self.program, self.rolled, self.inputs = program, rolled, program.graph.aux.inputs
        self.report = [*report(self.groups, rolled), *report_own(graph for _, graph in self._graphs)]
        self.random = program.random if rolled is None else rolled.random
        self._plain, self.answers = program, Answers(program.graph)
        self.made_buffers = made_buffers(program.graph.changed)
        """Buffers that forward registers, of constants: name, value, and whether a `state_dict` has it."""
        own = {None, *model.modules()}  # None: the scaffold of the capture, gone by now
        self.others: ModuleFlags = tuple((ref, flag) for ref, flag in program.graph.modules if ref() not in own)
        """Modules that ran without being part of the model (a teacher), with their training flags."""
        modules = dict(cast(Iterable[tuple[str, torch.nn.Module]], model.named_modules()))
        modules |= {f"{type(m).__name__} ({id(m)})": m for ref, _ in self.others if (m := ref()) is not None}
        self._attributes = Guard(module_roots(modules.items(), model))
        self._reads, self._look_again = reads, look_again
        self._rows: RowSplit | None = None
        self._original: LossProgram | None = None

    @property
    def _graphs(self) -> list[tuple[str, torch.fx.GraphModule]]:
        """Its graph, and those of the repeated layers as often as they run; each with the path of its module."""
        return [("", self.program.graph.module), *(self.rolled.graphs if self.rolled else ())]

    def _copy(self) -> "LossProgram":
        other = copy.copy(self)
        other._original = self  # by which other steps find it as long as this one uses it
        return other

    @functools.cached_property
    def _outline(self) -> GraphOutline:
        calls = self.rolled.calls if self.rolled else {}
        # Of its own capture: what is more general has that of the first.
        return outline_of_loss(self.program.graph, calls, self.others)

    def is_same(self, other: "LossProgram") -> bool:
        """Tell whether another capture computes the same."""
        return self._outline.is_same(other._outline)

    def difference(self, other: "LossProgram") -> str | None:
        """The name of a value that was another one when another capture read it."""
        return self._reads.difference(other._reads) or self._attributes.difference(other._attributes)

    def look_again(self, values: HostValues) -> None:
        """Capture the loss once more, and refuse it if it is another one now.

        What carries numbers is captured anew for each.
        """
        if self.answers.num <= 1 and not self.answers.kinds:
            self._look_again(self, values.of(0))
            self._reads.renew()  # a count of calls has gone on, and was seen to be harmless
            self._attributes.renew()

    def carrying(self, other: "LossProgram") -> "LossProgram | None":
        """A program for what this one and another capture are for, maybe this one; None if numbers are not all."""
        is_asked = self.answers.num and other.answers.num
        if not is_asked or (found := self._outline.differences(other._outline)) is None:
            return None
        answers, program = self.answers.wider(self._outline, found), self
        if answers is not self.answers:
            program = self._copy()
            program.answers, program.program = answers, self._plain.carrying(answers.kinds)
            program.rolled = None if self.rolled is None else self.rolled.of(program.program)
        reads = None if self._reads.same(other._reads) else other._reads
        answers.take(other.answers, other._outline, reads)
        return program

    def replaces(self, other: "LossProgram") -> bool:
        """Tell whether it is for all that another one is for."""
        return self._plain is other._plain

    def with_remat(self, remat: str) -> "LossProgram":
        """The same program, with another choice of what is computed again in the backward pass."""
        other = self._copy()
        other.rolled = None if self.rolled is None else self.rolled.with_remat(remat)
        return other

    def with_rows(self, rows: RowSplit | None) -> "LossProgram":
        """The same program, which keeps the rows of the batch split over these axes."""
        other = self._copy()
        other._rows = rows
        makers = (report_context, report_attention, report_experts)
        other.report = [*self.report, *(line for make in makers for line in make(self._graphs, rows))]
        return other

    def saying(self, lines: list[str]) -> "LossProgram":
        """The same program, which reports more."""
        other = self._copy()
        other.report = [*self.report, *lines]
        return other

    @property
    def written_out(self) -> list[str]:
        """The modules that write attention out over a sequence that is split."""
        return find_written_out(self._graphs)

    @property
    def host(self) -> HostPart | None:
        """What is computed on the host before each call, as Python asks for values."""
        return self.program.graph.host

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
    def outside(self) -> Iterator[tuple[str, torch.Tensor | np.ndarray]]:
        """Tensors that it closes over or has asked values of, and NumPy arrays that were read, with their names."""
        leaves = itertools.chain(self._attributes.leaves, self._reads.leaves)
        names = {id(value): name for name, value in leaves if isinstance(value, torch.Tensor)}
        sources = self.host.sources.values() if self.host else ()
        for tensor in (*self.closure, *(source for source in sources if isinstance(source, torch.Tensor))):
            yield names.get(id(tensor), "a tensor"), tensor
        yield from self._reads.arrays

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
    def train(self) -> bool:
        """Whether it has gradients."""
        return bool(self.program.graph.aux.grads)

    def outdated(self) -> str | None:
        """Say what has changed since the capture, of all that the signature does not tell; None if nothing has."""
        if not flags_hold(self.others):
            return "a module beside the model was switched between train() and eval()"
        if (name := self._attributes.changed()) is not None:
            return f"the attribute {name} has another value"
        name = self._reads.changed()
        return None if name is None else f"{name}, which the loss reads, has another value"

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
    def calls(self) -> list[MetricCall]:
        """What metric objects are to be given after each run, in order."""
        return self.program.graph.aux.calls

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
        with self.rows():
            outputs = self.program.run(key, *inputs.all()) if self.rolled is None else self.rolled.run(key, inputs)
        shape, graph = self.program.graph.aux, self.program.graph
        loss, *rest = outputs[: graph.num_outputs]
        by_name, rest = self.by_name(rest, tensors), rest[len(shape.grads) :]
        buffers, metrics = rest[: len(shape.buffers)], rest[len(shape.buffers) :]
        written = dict(zip(self.written, outputs[graph.num_outputs :], strict=False))
        return LossOutputs(
            loss=whole(array_of(loss)),
            metrics=jax.tree.unflatten(shape.metrics, map(whole, map(array_of, metrics))),
            grads=StackRows(by_name),
            buffers=StackRows(zip(shape.buffers, buffers, strict=True)),
            written=StackRows(written),
        )

    def extra_inputs(self, batch: Sequence[jax.Array], closure: Sequence[jax.Array]) -> list[jax.Array]:
        """The inputs of the graph that follow those of the model: leaves, what the host has computed, the closure."""
        num_rows = len(batch) - self.num_given
        given, others = iter(batch[num_rows:]), iter(closure)
        met = [next(given if is_given else others) for is_given in self.answers.are_given]
        return [*batch[:num_rows], *met]

    def rows(self) -> contextlib.AbstractContextManager[None]:
        """Let what is traced within know how the rows of the batch lie."""
        return rows_split(self._rows)

    def by_name(self, grads: Sequence[Any], tensors: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Gradients, those of bundles by member."""
        found: dict[str, Any] = {}
        for given, grad in zip(self.program.graph.aux.grads, grads, strict=False):
            if isinstance(given, str):
                found[given] = grad
            else:
                members = cast(list[Any], grad) if isinstance(grad, list) else [None] * len(given.names)
                found |= zip(given.names, members, strict=True)
        return {name: jnp.zeros_like(tensors[name]) if grad is None else grad for name, grad in found.items()}
