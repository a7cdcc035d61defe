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
        self._program = program
        self._plan = plan
        self._rows = rows
        self._stages = plan.stages
        rolled = program.rolled
        if rolled is None:
            raise ValueError(self._refusal(next((line for line in program.report), "they are not captured as one")))

        # The outputs of the graph: the loss, gradients, buffers, metrics.
        shape = program.program.graph.aux
        buffers_at = 1 + len(shape.grads)
        metrics_at = buffers_at + len(shape.buffers)
        loss, *others = rolled.outputs[: program.program.graph.num_outputs]
        grads = rolled.outputs[1:buffers_at]
        metrics = others[metrics_at - 1 :]
        self._refuse_writes(rolled.outputs[buffers_at:metrics_at])

        varying = itertools.compress(itertools.count(len(program.inputs)), self._differ)
        try:
            self.parts = parts_of(rolled.items, [loss, *metrics], grads, stages=self._stages, varying=varying)
        except NoPipeline as error:
            raise ValueError(self._refusal(str(error))) from None
        self.order = _order(self._stages, num, self.parts)

        # The parameter that a sum of gradients is of says where the sum lies.
        self._name_of_grad: dict[Operand, str] = {}
        for graph_input, output in zip(shape.grads, grads, strict=True):
            operands = operands_of([output])
            names = names_of(graph_input)
            if len(operands) == len(names):  # a gradient that is zero is no operand
                self._name_of_grad |= zip(operands, names, strict=True)

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

    def _refuse_writes(self, buffers: Sequence[object]) -> None:
        changed: list[str] = []
        for name, value in zip(self._program.buffers, buffers, strict=True):
            is_input = isinstance(value, Operand) and isinstance(value.source, int)
            if not is_input:
                changed.append(name)
        changed += self._program.written
        if changed:
            raise NotImplementedError(
                f"{caller()}: forward writes {', '.join(changed[:4])}{', ...' * (len(changed) > 4)}, and in a pipeline "
                "several microbatches are under way at once. Use a plan without pipeline, or layers that keep no "
                "statistics of the batch (nn.GroupNorm or nn.LayerNorm for nn.BatchNorm)."
            )

    @functools.cached_property
    def _differ(self) -> list[bool]:
        """Of the inputs of the graph that follow those of the model, whether they differ by microbatch."""
        are_given = self._program.answers.are_given
        graph = self._program.program.graph.module.graph
        nodes = graph.find_nodes(op="placeholder")[len(self._program.inputs) :]
        leaves = nodes[: len(nodes) - len(are_given)]
        return [node.meta["val"].ndim > 0 for node in leaves] + are_given

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

        # An evaluation may give fewer microbatches than the rounds of a pipeline need; those added are cut off again.
        num_missing = self.order.num - len(keys)
        if num_missing:
            keys = _filled(keys, num_missing)
            pairs = zip(others, self._differ, strict=True)
            others = [_filled(x, num_missing) if differs else x for x, differs in pairs]

        inputs = _Inputs(self._program.inputs, tensors, others, self._differ)
        assert self._program.rows is not None
        run = PipelineRun(self.parts, self.order, self._program.rows, keys=keys, inputs=inputs, place=self._place)
        losses_and_metrics, grads = run.run()
        loss, *metrics = jax.tree.map(lambda x: x[: self._num], losses_and_metrics)
        return LossOutputs(
            loss=loss,
            metrics=jax.tree.unflatten(shape.metrics, metrics),
            grads=StackRows(self._program.by_name(grads, tensors), forms_of(tensors)),
            buffers=StackRows((name, tensors[name]) for name in shape.buffers),
            written=StackRows({}),
        )

    def _place(self, first: Operand, total: jax.Array) -> jax.Array:
        """A sum of gradients of layers, `(rounds, layers, stages, ...)`, where the parameter of the first one lies."""
        name = self._name_of_grad.get(first)
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


def _filled(values: jax.Array, num_missing: int) -> jax.Array:
    """More microbatches like the last one."""
    return jnp.concatenate([values] + [values[-1:]] * num_missing)


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
