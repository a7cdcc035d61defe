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
from torch_shard._inspect.layouts import MICROBATCHES, Layout, Recipe, layouts_of
from torch_shard._inspect.proofs import Proof, Proofs
from torch_shard._inspect.training import Run, Training, check_optimizers
from torch_shard._loss import check_loss_fn
from torch_shard._optim import adamw
from torch_shard._plans import quietly
from torch_shard._sharding import LossFn, ShardingPlan, describe_mesh
from torch_shard._train import ROUNDING, Replay, Values, compared, differences, losses_in, repeated_in_float64

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
    training = Training(model, loss_fn, [batch] * steps, optimizers, compute_dtype, batch_spec)
    layouts, is_usual = layouts_of(plans, meshes), plans is None
    with jax.enable_x64(training.dtype == torch.float64 or has_x64()):
        rows, run = _rows(training, layouts, is_usual=is_usual)
    again = [at for at, row in enumerate(rows) if not row.holds and not row.refused]
    if again and not run.step.draws_random and training.dtype == torch.float32:
        chosen = [layouts[at] for at in again]
        exact = repeated_in_float64(run.in_float64, lambda wide: _rows(wide, chosen, is_usual=is_usual)[0])
        for at, row in zip(again, exact or (), strict=False):
            rows[at] = row
    reference = next(row.compared.reference for row in rows if row.compared is not None)
    return Proofs(tuple(rows), reference, steps)


def _rows(training: Training, layouts: Sequence[Layout], *, is_usual: bool) -> tuple[list[Proof], Run]:
    """Train under each layout, for a row of the table or to say why it does not fit; and one of these runs."""
    rows, runs, errors = list[Proof](), list[Run](), list[Exception]()
    known: dict[int, tuple[str, list[Values], float, str]] = {}  # the reference, by the number of microbatches
    for label, mesh, plan in layouts:
        about = describe_mesh(mesh)
        try:
            with quietly():
                made = plan if isinstance(plan, ShardingPlan) else plan(training.model, mesh)
            parts = MICROBATCHES if made.pipeline else 1
            run = training.on(mesh, made, parts)
        except (ValueError, NotImplementedError) as error:
            errors.append(error)
            rows.append(Proof(label, about, "", None, " ".join(str(error).split()), need_not_fit=is_usual))
            continue
        if parts not in known:
            known[parts] = *run.reference(), *_limits(run)
            runs.append(run)
        name, reference, tolerance, dtype = known[parts]
        found = compared(differences(reference, None, run.values), name, mesh, tolerance, losses_in(reference))
        rows.append(Proof(label, about, dtype, found))
    if len(errors) == len(layouts):
        raise errors[0]
    return rows, runs[0]


def _limits(run: Run) -> tuple[float, str]:
    """How far values may be apart, of the largest entry, and in what they were computed, in words."""
    dtype = run.training.dtype
    if dtype == torch.float64:
        replay = Replay(run.step.gradient_step, run.step.init(), run.step.put(run.training.batches[0]))
        with _Narrow() as found, torch.no_grad():
            replay.forward(next(iter(replay)))
        if found.is_narrow:
            return EXACT[torch.float32], "float64, in part float32"
    return EXACT.get(dtype, ROUNDING.get(dtype, 1e-4)), str(dtype).removeprefix("torch.")
