"""The same training by steps on meshes and by eager torch, side by side: what each makes of every batch, by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import optax
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import caller, public
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_count
from torch_shard._entries import LossFn
from torch_shard._optim import check_optimizer
from torch_shard._sharding import PlanFn, ShardingPlan, check_mesh, make_mesh, plan_for
from torch_shard._state import TrainState
from torch_shard._train import (
    Comparison,
    Replay,
    TrainStep,
    Values,
    array_of,
    compared,
    differences,
    in_float64,
    make_train_step,
    numbers_of,
    precision_of,
    rounding_of,
    told_apart,
)

Optimizers = tuple[optax.GradientTransformation, Callable[..., torch.optim.Optimizer]]
"""One of optax, and what makes one of torch for the same rule from a list of parameters."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, everywhere alike: a batch for each step, the others as `make_train_step` takes them."""

    model: torch.nn.Module
    loss_fn: LossFn
    batches: Sequence[PyTree]
    optimizers: Optimizers
    compute_dtype: torch.dtype | None = None
    batch_spec: PartitionSpec | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The one that rounds most."""
        return precision_of(self.model, self.compute_dtype)

    def on(self, mesh: Mesh, plan: ShardingPlan, accumulate_steps: int = 1) -> Run:
        """Train by a step on a mesh, or on one device."""
        step = make_train_step(
            self.model,
            self.loss_fn,
            _keeping_gradients(self.optimizers[0]),
            mesh=mesh,
            plan=plan,
            batch_spec=self.batch_spec,
            compute_dtype=self.compute_dtype,
            accumulate_steps=accumulate_steps,
        ).apart()
        state = step.init()
        after_steps = list[Values]()
        # Accelerators round products of float32 by default, torch does not.
        with jax.default_matmul_precision("highest"):
            for batch in self.batches:
                state, metrics = step(state, batch)
                (gradients, _) = cast(tuple[PyTree, PyTree], state.opt_state)
                values = _entries(state, state.tensors)
                for name, gradient in gradients.items():
                    values["gradient", name] = array_of(gradient)
                loss = metrics.pop("loss")
                metrics.pop("grad_norm", None)
                after_steps.append(numbers_of(loss, metrics) | values)
        return Run(self, step, after_steps)


@dataclasses.dataclass(frozen=True)
class Run:
    """A training on a mesh: the step, and after each batch loss, metrics, gradients, parameters and buffers."""

    training: Training
    step: TrainStep
    values: list[Values]

    def in_torch(self) -> list[Values]:
        """The same by eager torch on the CPU, from where the step begins and in its microbatches."""
        state = self.step.init()
        model = self.step.gradient_step.cpu_model(state)
        optimizer = self.training.optimizers[1]([p for p in model.parameters() if p.requires_grad])
        after_steps = list[Values]()
        for batch in self.training.batches:
            optimizer.zero_grad()
            replay = Replay(self.step.gradient_step, state, self.step.put(batch), model=model)
            numbers = replay.run(state.params)
            optimizer.step()
            after_steps.append(numbers | _entries(state, replay.held(state.tensors)))
        return after_steps

    def alone(self) -> list[Values]:
        """The same on one device of this process, which holds all of it."""
        device = next(d for d in self.step.mesh.devices.flat if d.process_index == jax.process_index())
        mesh = make_mesh([device], topology=None, batch=1)
        plan = ShardingPlan({}, default=PartitionSpec())
        gradient_step = self.step.gradient_step
        batches = [gradient_step.for_one_device(self.step.put(batch)) for batch in self.training.batches]
        whole = dataclasses.replace(self.training, batches=batches, batch_spec=PartitionSpec())
        return whole.on(mesh, plan, self.step.options.accumulate_steps).values

    def reference(self) -> tuple[str, list[Values]]:
        """What it is compared with, and its name: torch's random numbers are others than JAX's."""
        return ("one device", self.alone()) if self.step.draws_random else ("eager torch", self.in_torch())

    def in_float64(self) -> Training:
        """The training with a copy of the model and the batches in float64, for where 64 bits are enabled."""
        model = self.step.gradient_step.cpu_model(self.step.init()).double()
        return dataclasses.replace(self.training, model=model, batches=list(map(in_float64, self.training.batches)))


def check_optimizers(optimizer: object, torch_optimizer: object, default: Optimizers) -> Optimizers:
    """Both optimizers, or the default ones."""
    if (optimizer is None) != (torch_optimizer is None):
        raise ValueError(f"{caller()}: give optimizer and torch_optimizer both, for the same rule, or neither.")
    if optimizer is None:
        return default
    check_optimizer(optimizer)
    check_call("torch_optimizer", torch_optimizer, "params", hint="functools.partial(torch.optim.SGD, lr=0.1) is one.")
    return cast(Optimizers, (optimizer, torch_optimizer))


def _keeping_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, with the last gradients in its state."""
    keep = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, updates))
    return optax.chain(keep, optimizer)


def _entries(state: TrainState, tensors: Mapping[str, PyTree]) -> Values:
    """Parameters and buffers."""
    values: Values = {}
    for name, value in tensors.items():
        values["buffer" if name in state.buffers else "parameter", name] = array_of(value)
    return values


@public
def compare_with_torch(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    steps: int = 1,
    optimizer: optax.GradientTransformation | None = None,
    torch_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    batch_spec: PartitionSpec | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Comparison:
    """Train copies of a model on one batch by eager torch on the CPU, on one device and on the mesh, and compare.

    Args:
        model: Any module with values, on the CPU or the jax device; it is left as it is.
        loss_fn: `loss_fn(model, batch)`, plain torch; returns what `make_train_step` takes.
            If it draws random numbers (dropout), torch's are others than JAX's, so one device is compared with the
            mesh alone.
        batch: A pytree of CPU tensors, of global sizes.
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: Which parameter and buffer is split how, by name; or a function of `(model, mesh)` that says it.
        steps: How many steps to take on this batch.
        optimizer: Of optax, by default plain gradient descent with a rate of 0.01.
        torch_optimizer: Makes torch's optimiser for the same rule from a list of parameters.
        batch_spec: How each leaf of a batch is split; by default the leading dim over the mesh axis `batch`.
        compute_dtype: `torch.bfloat16` for mixed precision, as `make_train_step` takes it; torch then computes with
            parameters cast alike.

    Returns:
        A `Comparison`: loss and metrics, each gradient, and each parameter and buffer after the steps, worst first;
        of several steps the worst counts.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> found = ts.compare_with_torch(
        ...     torch.nn.Linear(4, 2), lambda model, batch: model(batch).square().mean(), torch.ones(8, 4),
        ...     mesh=ts.make_mesh(batch=2, model=2), plan=ts.ShardingPlan({"weight": P("model")}, default=P()),
        ... )
        >>> found.raise_if_different()
    """
    check_mesh(mesh)
    check_count("steps", steps)
    default = optax.sgd(1e-2), functools.partial(torch.optim.SGD, lr=1e-2)
    optimizers = check_optimizers(optimizer, torch_optimizer, default)
    training = Training(model, loss_fn, [batch] * steps, optimizers, compute_dtype, batch_spec)
    return _compare(training, mesh, plan_for(plan, training.model, mesh))


def _compare(training: Training, mesh: Mesh, plan: ShardingPlan) -> Comparison:
    run = training.on(mesh, plan)
    name, reference = run.reference()
    # Of a loss that draws random numbers, one device is the reference itself.
    is_random = run.step.draws_random
    rows = differences(reference, None if is_random else run.alone(), run.values)
    if not is_random and training.dtype == torch.float32:
        rows = told_apart(rows, run.in_float64, lambda wide: _compare(wide, mesh, plan).rows)
    return compared(rows, name, mesh, rounding_of(training.dtype), reference)
