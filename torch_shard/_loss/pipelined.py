"""A loss whose repeated layers are the stages of a pipeline, over all microbatches of a batch."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from torch_shard._common.caller import caller
from torch_shard._loss.loss_program import LossInputs, LossOutputs, LossProgram, forms_of
from torch_shard._scan import (
    GraphInput,
    NoPipeline,
    Operand,
    Order,
    Parts,
    PipelineRun,
    StackRows,
    names_of,
    operands_of,
    parts_of,
    take,
)
from torch_shard._sharding import ResolvedPlan, Stacks, Stages, constrain_in_steps


class PipelinedLoss:
    """The program of a loss for the stages of a plan."""

    def __init__(self, program: LossProgram, plan: ResolvedPlan, num: int, rows: Sequence[str]) -> None:
        assert plan.stages is not None
        self._num = num
        self._program, self._plan, self._rows, self._stages = program, plan, rows, plan.stages
        shape = program.program.graph.aux
        rolled, self._num_grads = program.rolled, len(shape.grads)
        if rolled is None:
            raise ValueError(self._refusal(next((line for line in program.report), "they are not captured as one")))
        outputs = rolled.outputs
        self._buffers = outputs[1 + self._num_grads :][: len(shape.buffers)]
        self._refuse_writes()
        given = [outputs[0], *outputs[1 + self._num_grads + len(shape.buffers) : program.program.graph.num_outputs]]
        varying = itertools.compress(itertools.count(len(program.inputs)), self._others)
        try:
            self.parts = parts_of(
                rolled.items, given, outputs[1 : 1 + self._num_grads], stages=self._stages, varying=varying
            )
        except NoPipeline as error:
            raise ValueError(self._refusal(str(error))) from None
        self.order = _order(self._stages, num, self.parts)
        pairs = zip(shape.grads, outputs[1:], strict=False)
        names = ((operands, names_of(g)) for g, o in pairs if len(operands := operands_of([o])) == len(names_of(g)))
        self._names = {v: name for operands, named in names for v, name in zip(operands, named, strict=True)}

    @property
    def report(self) -> list[str]:
        """Say what the stages are and how they work."""
        stages, order = self._stages, self.order
        per = len(stages.layers) // (stages.num * stages.repeats)
        rounds = f", {stages.repeats} rounds" if stages.repeats > 1 else ""
        return [
            f"{stages.layers[0]} to {stages.layers[-1]}: {stages.num} stages over {stages.axis!r} of {per} layers"
            f"{rounds}, {order.num} microbatches, {order.name}: {order.idle:.0%} of the time is idle"
        ]

    def _refusal(self, why: str) -> str:
        first, last = self._stages.layers[0], self._stages.layers[-1]
        return (
            f"{caller()}: the layers {first} to {last} cannot be the stages of a pipeline: {why}. Use a plan without "
            "pipeline, or make of each layer a module that takes the result of the one before and gives the next one's."
        )

    def _refuse_writes(self) -> None:
        shape = self._program.program.graph.aux
        pairs = zip(shape.buffers, self._buffers, strict=True)
        kept = {name for name, value in pairs if isinstance(value, Operand) and isinstance(value.source, int)}
        if changed := [*(name for name in shape.buffers if name not in kept), *self._program.written]:
            raise NotImplementedError(
                f"{caller()}: forward writes {', '.join(changed[:4])}{', ...' * (len(changed) > 4)}, and in a pipeline "
                "several microbatches are under way at once. Use a plan without pipeline, or layers that keep no "
                "statistics of the batch (nn.GroupNorm or nn.LayerNorm for nn.BatchNorm)."
            )

    @functools.cached_property
    def _others(self) -> list[bool]:
        """Of the inputs of the graph that follow those of the model, whether they differ by microbatch."""
        given = self._program.answers.are_given
        graph = self._program.program.graph.module.graph
        nodes = graph.find_nodes(op="placeholder")[len(self._program.inputs) :]
        leaves = nodes[: len(nodes) - len(given)]
        return [*(node.meta["val"].ndim > 0 for node in leaves), *given]

    def run(
        self, keys: jax.Array, tensors: Stacks, batch: Sequence[jax.Array], closure: Sequence[jax.Array]
    ) -> LossOutputs:
        """The losses and metrics of the microbatches, `(num, ...)`, and the sums of their gradients.

        Args:
            keys: A random key for each.
            tensors: What the model holds.
            batch: The leaves, and what the host has computed of them, each `(num, ...)` but for scalars.
            closure: What the loss closes over.
        """
        shape = self._program.program.graph.aux
        others = self._program.extra_inputs(batch, closure)
        if more := self.order.num - len(keys):  # of an evaluation, which gives too few for the rounds
            keys = _filled(keys, more)
            others = [_filled(x, more) if differs else x for x, differs in zip(others, self._others, strict=True)]
        inputs = _Inputs(self._program.inputs, tensors, others, self._others)
        assert self._program.rows is not None
        run = PipelineRun(self.parts, self.order, self._program.rows, keys=keys, inputs=inputs, place=self._place)
        given, grads = run.run()
        loss, *metrics = jax.tree.map(lambda x: x[: self._num], given)
        return LossOutputs(
            loss=loss,
            metrics=jax.tree.unflatten(shape.metrics, metrics),
            grads=StackRows(self._program.by_name(grads, tensors), forms_of(tensors)),
            buffers=StackRows((name, tensors[name]) for name in shape.buffers),
            written=StackRows({}),
        )

    def _place(self, first: Operand, total: jax.Array) -> jax.Array:
        """A sum of gradients of layers, `(rounds, layers, stages, ...)`, where the parameter of the first one lies."""
        name = self._names.get(first)
        if name is None:
            return total
        sharding = self._plan.stored(name)
        if len(sharding.spec) > total.ndim - 3:
            return total
        spec = PartitionSpec(None, None, self._stages.axis, *sharding.spec)
        return constrain_in_steps(total, NamedSharding(sharding.mesh, spec), self._rows)


def _order(stages: Stages, num: int, parts: Parts) -> Order:
    """When each stage works on what."""
    if parts.backward is None:
        return Order(stages, num if stages.repeats == 1 else max(num, stages.num), one_by_one=False)
    if stages.repeats > 1 and num < stages.num:
        raise ValueError(
            f"{caller()}: a pipeline with repeats={stages.repeats} needs as many microbatches as stages: "
            f"accumulate_steps={num}, {stages.axis}={stages.num}. Use accumulate_steps={2 * stages.num}, or repeats=1."
        )
    return Order(stages, num, stages.pipeline.schedule == "1f1b")


def _filled(values: jax.Array, more: int) -> jax.Array:
    """More microbatches like the last one."""
    return jnp.concatenate([values, *[values[-1:]] * more])


class _Inputs(LossInputs):
    """The inputs of a loss for all microbatches."""

    def __init__(
        self, named: list[GraphInput], tensors: Stacks, others: list[jax.Array], differ: Sequence[bool]
    ) -> None:
        super().__init__(named, tensors, others)
        self._pairs = list(zip(others, differ, strict=True))

    @property
    def num_rows(self) -> int:
        """Of a microbatch; 0 if there are none."""
        return next((x.shape[1] for x, differs in self._pairs if differs and x.ndim > 1), 0)

    def at(self, index: jax.Array) -> LossInputs:
        """Those of one of them."""
        return self.of([take(x, index) if differs else x for x, differs in self._pairs])

    def stack(self, number: int) -> jax.Array | None:
        """Of all of them; None for what is the same for each."""
        at = number - len(self._named)
        return self._others[at] if at >= 0 and self._pairs[at][1] else None
