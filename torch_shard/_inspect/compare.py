"""Training by eager torch and by a step of ours side by side: compare_with_torch, and the table it returns."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import public
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_count
from torch_shard._inspect.side_by_side import keeping_gradients, train_in_torch, train_on_mesh
from torch_shard._optim import check_optimizer
from torch_shard._sharding import LossFn, ShardingPlan, check_mesh, describe_mesh, make_mesh
from torch_shard._train import (
    ROUNDING,
    Comparison,
    Difference,
    TrainStep,
    Values,
    difference_of,
    in_float64,
    like_model,
    make_train_step,
)


@public
def compare_with_torch(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    mesh: Mesh,
    plan: ShardingPlan,
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
        plan: Which parameter and buffer is split how, by name.
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
    if (optimizer is None) != (torch_optimizer is None):
        raise ValueError("compare_with_torch: give optimizer and torch_optimizer both, for the same rule, or neither.")
    if optimizer is not None:
        check_optimizer(optimizer)
        check_call(
            "torch_optimizer", torch_optimizer, "params", hint="functools.partial(torch.optim.SGD, lr=0.1) is one."
        )
    optimizers = (optimizer or optax.sgd(1e-2), torch_optimizer or functools.partial(torch.optim.SGD, lr=1e-2))
    return compare_batches(
        model,
        loss_fn,
        [batch] * steps,
        mesh=mesh,
        plan=plan,
        optimizers=optimizers,
        batch_spec=batch_spec,
        compute_dtype=compute_dtype,
    )


def compare_batches(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Sequence[PyTree],
    *,
    mesh: Mesh,
    plan: ShardingPlan,
    optimizers: tuple[optax.GradientTransformation, Callable[..., torch.optim.Optimizer]],
    batch_spec: PartitionSpec | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Comparison:
    """Do as `compare_with_torch` does, with a batch for each step."""
    mine = next((d for d in mesh.devices.flat if d.process_index == jax.process_index()), mesh.devices.flat[0])
    alone = make_mesh(devices=[mine], topology=None, **dict.fromkeys(mesh.axis_names, 1))

    def train(mesh: Mesh) -> tuple[TrainStep, list[Values]]:
        options: dict[str, Any] = {"plan": plan, "batch_spec": batch_spec, "compute_dtype": compute_dtype}
        step = make_train_step(model, loss_fn, keeping_gradients(optimizers[0]), mesh=mesh, **options)
        return step, train_on_mesh(step, batches)

    (step, on_mesh), (_, on_one) = train(mesh), train(alone)
    random = step.draws_random
    in_torch = on_one if random else train_in_torch(step, batches, optimizers[1])
    keys = {**in_torch[-1], **on_mesh[-1]}
    rows = [difference_of(key, in_torch, None if random else on_one, on_mesh) for key in keys]
    dtypes = {t.dtype for t in model.parameters()} | ({compute_dtype} if compute_dtype else set())
    tolerance = max(ROUNDING.get(dtype, 1e-4) for dtype in dtypes)
    if not random and dtypes == {torch.float32} and any(not row.worst <= tolerance for row in rows):

        def again(model: torch.nn.Module, batches: Sequence[PyTree]) -> Sequence[Difference]:
            options = {"mesh": mesh, "plan": plan, "optimizers": optimizers, "batch_spec": batch_spec}
            return compare_batches(model, loss_fn, batches, **options).rows

        exact = in_float64(step, like_model(step.export(step.init()), step.model), batches, again)
        rows = [dataclasses.replace(row, in_float64=exact.get((row.kind, row.name))) for row in rows]
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: -row.worst)),
        reference="one device" if random else "eager torch",
        mesh=f"mesh {describe_mesh(mesh)}",
        tolerance=tolerance,
        losses=tuple(float(values["loss", "loss"]) for values in in_torch),
    )
