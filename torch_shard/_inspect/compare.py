"""Training by eager torch and by a step of ours side by side: compare_with_torch, and the table it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable

import optax
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import public
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count
from torch_shard._inspect.training import Training, check_optimizers
from torch_shard._sharding import LossFn, ShardingPlan, check_mesh
from torch_shard._train import ROUNDING, Comparison, compared, differences, losses_in, told_apart


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
    default = optax.sgd(1e-2), functools.partial(torch.optim.SGD, lr=1e-2)
    optimizers = check_optimizers(optimizer, torch_optimizer, default)
    training = Training(model, loss_fn, [batch] * steps, optimizers, compute_dtype, batch_spec)
    return compare_batches(training, mesh, plan)


def compare_batches(training: Training, mesh: Mesh, plan: ShardingPlan) -> Comparison:
    """Do as `compare_with_torch` does, with a batch for each step."""
    run = training.on(mesh, plan)
    name, reference = run.reference()
    is_random = run.step.draws_random
    rows = differences(reference, None if is_random else run.alone(), run.values)
    tolerance = ROUNDING.get(training.dtype, 1e-4)
    if not is_random and training.dtype == torch.float32:
        rows = told_apart(rows, tolerance, run.in_float64, lambda wide: compare_batches(wide, mesh, plan).rows)
    return compared(rows, name, mesh, tolerance, losses_in(reference))
