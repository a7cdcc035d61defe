"""Every way to lay a model over devices, proved against eager torch in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.overrides import TorchFunctionMode

from torch_shard._common.caller import public
from torch_shard._common.dtypes import has_x64
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count
from torch_shard._common.wrappers import check_module
from torch_shard._inspect.layouts import Layout, Recipe, layouts_of
from torch_shard._inspect.proofs import Proof, Proofs
from torch_shard._inspect.training import Run, Training, check_optimizers
from torch_shard._loss import check_loss_fn
from torch_shard._optim import adamw
from torch_shard._sharding import LossFn, ShardingPlan, describe_mesh, make_mesh
from torch_shard._train import ROUNDING, Comparison, Replay, Values, differences, repeated_in_float64

EXACT = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of the largest entry: sums of some thousand terms in another order, through some layers and steps."""

_ADAMW = {"lr": 1e-3, "eps": 1e-5}
"""Adam divides a gradient by its size: with torch's eps of 1e-8, one that is only rounding becomes a whole step."""


class _Narrow(TorchFunctionMode):
    """Notes whether a function gives float32."""

    is_narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.is_narrow |= isinstance(out, torch.Tensor) and out.dtype == torch.float32
        return out


@public
def prove(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    meshes: Sequence[Mesh] | Mesh | None = None,
    plans: Mapping[str, ShardingPlan | Recipe] | Sequence[str] | None = None,
    steps: int = 3,
    optimizer: optax.GradientTransformation | None = None,
    torch_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    batch_spec: PartitionSpec | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Proofs:
    """Train copies of a model under each of several plans, and compare all values with eager torch.

    A layout holds if loss, metrics, every gradient, and every parameter and buffer after each step are within 1e-5 of
    eager torch's in float32, relative to the largest entry. Where they are not, both sides are repeated in float64,
    where 1e-10 is allowed: what was rounding shrinks to nothing, an error stays. (Where a model itself computes some of
    it in float32, as norms of transformers do, 1e-5 is allowed still.) In mixed precision, and where the loss cannot
    be repeated, the tolerance is that of `compare_with_torch`.

    Args:
        model: Any module with values, on the CPU or the jax device; it is left as it is. Make it small: eager torch
            needs all of it on this host, and each layout compiles.
        loss_fn: `loss_fn(model, batch)`, plain torch; returns what `make_train_step` takes. Metrics are compared too,
            so that it may return outputs: `return loss, {"logits": logits}`. If it draws random numbers (dropout),
            torch's are others than JAX's, so that one device is the reference.
        batch: A pytree of CPU tensors, of global sizes, taken in each step.
        meshes: Where the plans are to lie, each plan on each mesh. By default each of the usual layouts has a mesh of
            its own, of all devices.
        plans: Names of usual layouts, `"dp"`, `"fsdp"`, `"hsdp"`, `"fsdp_tp"`, `"tp_sequence"`, `"context"`,
            `"expert"`, `"stage"` and `"stage_tp"` (two stages and two microbatches, which torch takes too); or plans
            and recipes of your own by name, `{"mine": plan, "fsdp": ts.plans.fsdp}`. By default all of the usual.
        steps: How many to take.
        optimizer: Of optax; by default AdamW with a rate of 1e-3 and an eps of 1e-5.
        torch_optimizer: Makes torch's optimizer for the same rule from a list of parameters.
        batch_spec: How each leaf of a batch is split, for all layouts. By default the leading dim over the mesh axis
            `batch`, with `"hsdp"` over `replica` too.
        compute_dtype: `torch.bfloat16` for mixed precision, as `make_train_step` takes it.

    Returns:
        A `Proofs`: a table with a row for each plan and mesh. One that does not fit the model or the batch says why
        (heads that do not divide, no experts); it fails if it was asked for by `plans`, and if none fits, that is an
        error.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A name is none of the usual layouts, the model is on the meta device, one optimizer comes without
            the other, or nothing fits the model and the batch.

    Example:
        >>> import torch, torch_shard as ts
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> def loss_fn(model, batch):
        ...     out = model(batch)
        ...     return out.square().mean(), {"out": out}
        >>> found = ts.prove(model, loss_fn, torch.ones(8, 4), plans=["fsdp", "fsdp_tp"])
        >>> found.raise_if_different()
    """
    model = check_module("model", model)
    check_loss_fn(loss_fn)
    check_count("steps", steps)
    if meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"prove: {meta[0]} is on the meta device. A proof needs values: build a small model on the CPU, with "
            "random ones."
        )
    default = adamw(**_ADAMW), functools.partial(torch.optim.AdamW, **_ADAMW)
    optimizers = check_optimizers(optimizer, torch_optimizer, default)
    training = Training(model, loss_fn, [batch] * steps, optimizers, compute_dtype)
    layouts = layouts_of(plans, meshes, batch_spec)
    with jax.enable_x64(training.dtype == torch.float64 or has_x64()):
        runs = _runs(training, layouts)
        rows = _rows(layouts, runs)
    is_random = any(run.step.draws_random for run in runs if isinstance(run, Run))
    again = [at for at, row in enumerate(rows) if not row.holds and not row.refused]
    if again and not is_random and training.dtype == torch.float32:
        wide = next(run for run in runs if isinstance(run, Run)).in_float64
        chosen = [layouts[at] for at in again]
        exact = repeated_in_float64(wide, lambda wide: _rows(chosen, _runs(wide, chosen)))
        for at, row in zip(again, exact or (), strict=False):
            rows[at] = row
    return Proofs(tuple(rows), "one device" if is_random else "eager torch", steps)


def _runs(training: Training, layouts: Sequence[Layout]) -> list[Run | Exception]:
    """Train under each layout, or say why it does not fit."""
    runs = list[Run | Exception]()
    for layout in layouts:
        try:
            plan = layout.plan_for(training.model)
            runs.append(training.on(layout.mesh, plan, layout.batch_spec, layout.accumulate_steps))
        except (ValueError, NotImplementedError) as error:
            runs.append(error)
    errors = [run for run in runs if isinstance(run, Exception)]
    if len(errors) == len(runs):
        raise errors[0]
    return runs


def _rows(layouts: Sequence[Layout], runs: Sequence[Run | Exception]) -> list[Proof]:
    """A row of the table for each layout, beside eager torch, or beside one device where random numbers are drawn."""
    fitting = [run for run in runs if isinstance(run, Run)]
    is_random = any(run.step.draws_random for run in fitting)
    tolerance, label = _limits(fitting[0])
    references, rows = dict[int, list[Values]](), list[Proof]()
    for layout, run in zip(layouts, runs, strict=True):
        mesh, parts = describe_mesh(layout.mesh), layout.accumulate_steps
        if isinstance(run, Exception):
            said = " ".join(str(run).split())
            rows.append(Proof(layout.name, mesh, "", None, said, need_not_fit=layout.is_usual))
            continue
        if parts not in references:
            references[parts] = _alone(run.training, parts) if is_random else run.in_torch()
        found = sorted(differences(references[parts], None, run.values), key=lambda row: -row.worst)
        losses = tuple(float(values["loss", "loss"]) for values in references[parts])
        against = "one device" if is_random else "eager torch"
        rows.append(
            Proof(layout.name, mesh, label, Comparison(tuple(found), against, f"mesh {mesh}", tolerance, losses))
        )
    return rows


def _alone(training: Training, accumulate_steps: int) -> list[Values]:
    """The training on one device."""
    mesh = make_mesh(jax.local_devices()[:1], topology=None, batch=1)
    return training.on(mesh, ShardingPlan({}, default=PartitionSpec()), PartitionSpec(), accumulate_steps).values


def _limits(run: Run) -> tuple[float, str]:
    """How far values may be apart, of the largest entry, and in what they were computed, in words."""
    dtype = run.training.dtype
    if dtype == torch.float64:
        state = run.step.init()
        part = next(iter(Replay(run.step, state, run.step.put(run.training.batches[0]))))
        with _Narrow() as found, torch.no_grad():
            part.forward()
        if found.is_narrow:
            return EXACT[torch.float32], "float64, in part float32"
    return EXACT.get(dtype, ROUNDING.get(dtype, 1e-4)), str(dtype).removeprefix("torch.")
