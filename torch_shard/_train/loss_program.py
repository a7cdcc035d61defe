"""A module with a torch loss as one captured program: loss, metrics, gradients and new buffers of named tensors."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch

from torch_shard._capture import (
    Guard,
    HostPart,
    MetricCall,
    Mismatch,
    ModuleFlags,
    Precision,
    Reads,
    clocks_noted,
    flags_hold,
    generator_states,
    made_buffers,
    module_roots,
    reached_by,
)
from torch_shard._common.caller import caller
from torch_shard._common.fx import outputs_of
from torch_shard._common.pieces import whole
from torch_shard._common.random import Key
from torch_shard._common.types import PyTree
from torch_shard._lowering import (
    GraphOutline,
    Program,
    RowSplit,
    capture_settings,
    compiler_options,
    report_attention,
    report_own,
    rows_split,
)
from torch_shard._scan import (
    LayerOptions,
    RolledLoss,
    Siblings,
    StackRows,
    array_of,
    capture_layers,
    names_of,
    report,
)
from torch_shard._sharding import LossFn, ResolvedPlan, holdings
from torch_shard._train.activations import Activations
from torch_shard._train.batch import BatchSignature
from torch_shard._train.carried import Answers, outline_of_loss
from torch_shard._train.host_values import HostValues, capture_with
from torch_shard._train.joint import JointLoss, LossShape
from torch_shard._train.last_used import KEPT
from torch_shard._train.loss_inputs import LossInputs

logger = logging.getLogger(__name__)


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
        captured: tuple[Program[LossShape], RolledLoss | None, list[Siblings]],
        model: torch.nn.Module,
        reads: Guard,
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
        self._reads = reads
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
        return outline_of_loss(self)  # of its own capture: what is more general has that of the first

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
        other.report = [*self.report, *report_attention(self._graphs, rows)]
        return other

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
        """XLA options that the program needs to be right on these devices."""
        return compiler_options([graph for _, graph in self._graphs], {device.platform for device in mesh.devices.flat})

    def run(
        self,
        key: Key,
        tensors: Mapping[str, jax.Array],
        batch: Sequence[jax.Array],
        closure: Sequence[jax.Array],
    ) -> LossOutputs:
        """To be traced by JAX; the further inputs of `fit` follow the batch."""
        num_rows = len(batch) - self.num_given
        given, others = iter(batch[num_rows:]), iter(closure)
        met = [next(given if is_given else others) for is_given in self.answers.are_given]
        inputs = LossInputs(self.inputs, tensors, [*batch[:num_rows], *met])
        with rows_split(self._rows):
            outputs = self.program.run(key, *inputs.all()) if self.rolled is None else self.rolled.run(key, inputs)
        shape, graph = self.program.graph.aux, self.program.graph
        loss, *rest = outputs[: graph.num_outputs]
        by_name, rest = self._by_name(rest, tensors), rest[len(shape.grads) :]
        buffers, metrics = rest[: len(shape.buffers)], rest[len(shape.buffers) :]
        written = dict(zip(self.written, outputs[graph.num_outputs :], strict=False))
        return LossOutputs(
            loss=whole(array_of(loss)),
            metrics=jax.tree.unflatten(shape.metrics, map(whole, map(array_of, metrics))),
            grads=StackRows(by_name),
            buffers=StackRows(zip(shape.buffers, buffers, strict=True)),
            written=StackRows(written),
        )

    def _by_name(self, grads: Sequence[Any], tensors: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Gradients, those of bundles by member."""
        found: dict[str, Any] = {}
        for given, grad in zip(self.program.graph.aux.grads, grads, strict=False):
            if isinstance(given, str):
                found[given] = grad
            else:
                members = cast(list[Any], grad) if isinstance(grad, list) else [None] * len(given.names)
                found |= zip(given.names, members, strict=True)
        return {name: jnp.zeros_like(tensors[name]) if grad is None else grad for name, grad in found.items()}


class _Captures:
    """The captures of a model, for as long as steps use them: one holds what the loss closes over."""

    def __init__(self) -> None:
        self._refs: dict[object, list[weakref.ref[LossProgram]]] = {}

    def of(self, key: object) -> list[LossProgram]:
        """Those under a key, the newest first."""
        return [program for ref in self._refs.get(key, ()) if (program := ref()) is not None]

    def keep(self, key: object, programs: Sequence[LossProgram]) -> None:
        """Put these under a key, and forget what no step uses."""
        self._refs = {other: refs for other, refs in self._refs.items() if any(ref() is not None for ref in refs)}
        self._refs[key] = [weakref.ref(program) for program in programs]


_CAPTURED = weakref.WeakKeyDictionary[torch.nn.Module, _Captures]()


def loss_program(
    model: torch.nn.Module,
    loss_fn: LossFn,
    signature: BatchSignature,
    *,
    precision: Precision,
    train: bool,
    layers: LayerOptions,
    values: HostValues,
    plan: ResolvedPlan,
    microbatch: int = 0,
) -> LossProgram:
    """The program of `loss_fn(model, batch)` for batches like this, captured once per model, loss and signature.

    Args:
        model: Any module.
        loss_fn: Returns a scalar, or a pair of it and metrics.
        signature: Structure and types of the batch.
        precision: What it computes in.
        train: True for the loss with its gradients, False for the loss in eval mode.
        layers: What to do with repeated layers.
        values: What the host has of the batch and of buffers, where Python asks for values.
        plan: How what modules take and return is split.
        microbatch: For whose values it is.
    """
    held = holdings(model)
    entries = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in held.all.items())
    flags = tuple(m.training for m in model.modules()) if train else None
    key = (_identity(loss_fn), signature, entries, flags, precision, layers, capture_settings())
    key = (*key, values.num > 1, plan.activations, plan.mesh if plan.activations else None)  # the mesh says what fits
    family = _CAPTURED.setdefault(model, _Captures())
    programs = [program for program in family.of(key) if not program.outdated()]
    host = values.of(microbatch)
    program = next((program for program in programs if not isinstance(program.answers.run(host), Mismatch)), None)
    if program is None:
        activations = Activations(model, plan.activations, plan.mesh)
        joint = JointLoss(
            model, loss_fn, signature, precision=precision, train=train, host=host, activations=activations
        )
        program = capture_with(host, lambda: _captured(model, loss_fn, joint, layers, num_batch=len(signature.specs)))
        programs = [program, *programs[: KEPT - 1]]
    family.keep(key, programs)
    return program


def _captured(
    model: torch.nn.Module, loss_fn: LossFn, joint: JointLoss, layers: LayerOptions, *, num_batch: int
) -> LossProgram:
    what = f"{caller()}: the loss"
    reads = Reads(loss_fn)
    drawn = generator_states(reached_by(model, loss_fn))
    with contextlib.ExitStack() as stack:
        clocks = stack.enter_context(clocks_noted())
        stack.enter_context(_told(what, joint.signature))
        stack.enter_context(reads.seen())
        captured = capture_layers(model, loss_fn, layers, joint=joint, num_batch=num_batch, what=what)
    if (name := reads.changed()) is not None:  # a count of calls is harmless unless the loss depends on it
        _refuse_counting(joint, what, f"changes {name} on each call")
    if clocks:
        _refuse_counting(joint, what, f"reads {clocks[0]}")
    after = generator_states(reached_by(model, loss_fn))
    if advanced := [name for name, state in drawn.items() if after.get(name) != state]:
        _refuse_counting(joint, what, f"draws random numbers from {advanced[0]}")
    program = LossProgram(captured, model, guard := reads.guard())
    _warn_of(guard.too_large, what)
    return program


@functools.lru_cache(maxsize=1024)
def _warn_of(too_large: tuple[str, ...], what: str) -> None:
    """Say once what is read and not compared."""
    if too_large:
        logger.warning(
            "%s reads %s: too large to be compared before each step, so that later changes of their contents are not "
            "seen. Pass them in the batch, make them tensors, or make a new step after a change.",
            what,
            ", ".join(too_large),
        )


@contextlib.contextmanager
def _told(what: str, signature: BatchSignature) -> Generator[None, None, None]:
    """Let an error of the user's own code say that it ran for a capture, and on what."""
    try:
        yield
    except Exception as error:
        shown = ", ".join(f"{tuple(spec.shape)} {spec.dtype}" for spec in signature.specs[:9]) or "no arrays"
        note = f"{what} was captured, once, for a batch of {shown}."
        if isinstance(error, AttributeError) and error.name in ("module", "_orig_mod"):
            error.add_note("loss_fn is given the module that a wrapper of PyTorch runs: write model for model.module.")
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _refuse_counting(joint: JointLoss, what: str, does: str) -> None:
    """Refuse a loss that depends on a value that differs with each call: two captures then differ."""
    captures = [joint(None) for _ in range(2)]
    first, second = (Program(fn, specs, what).graph.module.code for fn, specs in captures)
    if first != second:
        raise NotImplementedError(
            f"{what} {does} and depends on it, but a compiled program is the same for every call. Pass it in the "
            "batch, or make it a buffer of the model."
        )


def _identity(fn: LossFn) -> object:
    try:
        return weakref.ref(fn)
    except TypeError:
        return fn
