"""Every usual way to lay a model over devices, proved against eager torch in one call, and the table of proofs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import optax
import torch
from jax.sharding import Mesh, PartitionSpec
from rich.table import Table
from torch.overrides import TorchFunctionMode

from torch_shard._common.caller import caller, error_prefix, public
from torch_shard._common.dtypes import has_x64
from torch_shard._common.printed import InNotebooks, printed
from torch_shard._common.specs import describe_mesh
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count, check_kind, check_module
from torch_shard._device import refuse_meta
from torch_shard._entries import LossFn
from torch_shard._inspect.training import Run, Training, check_optimizers
from torch_shard._loss import check_loss_fn
from torch_shard._optim import adamw
from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, pipeline, quietly, replicated, tp
from torch_shard._sharding import PlanFn, ShardingPlan, check_mesh, make_mesh, plan_for
from torch_shard._train import (
    Comparison,
    Difference,
    Replay,
    Values,
    beyond,
    compared,
    differences,
    repeated_in_float64,
    rounding_of,
)

MICROBATCHES = 2
"""Of plans that have stages."""

Layout = tuple[str, Mesh, ShardingPlan | PlanFn]
"""The name of a plan, its devices, and the plan, or the recipe that makes it."""


USUAL: Mapping[str, tuple[PlanFn, Mapping[str, int]]] = {
    "dp": (replicated, {"batch": 0}),
    "fsdp": (fsdp, {"batch": 0}),
    "hsdp": (hsdp, {"replica": 2, "batch": 0}),
    "fsdp_tp": (fsdp_tp, {"batch": 0, "model": 2}),
    "tp_sequence": (functools.partial(fsdp_tp, sequence=True), {"batch": 2, "model": 0}),
    "context": (functools.partial(fsdp_tp, tp=None, context="context"), {"batch": 2, "context": 0}),
    "expert": (expert, {"batch": 2, "model": 0}),
    "stage": (lambda model, mesh: pipeline(replicated(model, mesh)), {"batch": 0, "stage": 2}),
    "stage_tp": (lambda model, mesh: pipeline(tp(model, mesh)), {"batch": 0, "stage": 2, "model": 2}),
}
"""Recipes and sizes of axes: of an odd number of devices 1 in place of 2; 0 is what is left of them."""


def _usual_mesh(name: str) -> Mesh:
    """The mesh of a usual layout, of all devices."""
    _, asked_sizes = USUAL[name]
    num_left = jax.device_count()
    sizes = dict[str, int]()
    for axis, size in asked_sizes.items():
        if size and num_left % size:
            size = 1
        sizes[axis] = size
        num_left //= size or 1
    # An axis of size 0 takes what the others leave.
    return make_mesh(None, topology=None, **{axis: size or num_left for axis, size in sizes.items()})


def layouts_of(plans: PyTree, meshes: PyTree) -> list[Layout]:
    """What `ts.prove` is asked for.

    Args:
        plans: As `ts.prove` takes them.
        meshes: As `ts.prove` takes them.
    """
    chosen = _plans(plans)
    if meshes is None:
        unusual = [name for name in chosen if name not in USUAL]
        if unusual:
            raise ValueError(
                f"{caller()}: give meshes=[...] for the plans {', '.join(unusual)}: where they are to lie."
            )
        return [(name, _usual_mesh(name), plan) for name, plan in chosen.items()]

    several = [meshes] if isinstance(meshes, Mesh) else meshes
    check_kind("meshes", several, Sequence)
    layouts = list[Layout]()
    for mesh in cast(Sequence[Mesh], several):
        for name, plan in chosen.items():
            layouts.append((name, check_mesh(mesh), plan))
    return layouts


def _plans(plans: PyTree) -> Mapping[str, ShardingPlan | PlanFn]:
    """Plans by name."""
    plans = list(USUAL) if plans is None else plans
    if isinstance(plans, Mapping):
        for name, plan in cast(Mapping[object, object], plans).items():
            check_kind("a name in plans", name, str)
            if not isinstance(plan, ShardingPlan) and not callable(plan):
                raise TypeError(
                    f"{caller()}: plans[{name!r}] must be a ShardingPlan, or a function of a model and a mesh that "
                    f"makes one, such as ts.plans.fsdp; got {type(plan).__name__}."
                )
        return cast(Mapping[str, ShardingPlan | PlanFn], plans)

    names = [plans] if isinstance(plans, str) else plans
    check_kind("plans", names, Sequence, hint='Plans of your own have names: {"mine": plan}.')
    strange = [name for name in cast(Sequence[object], names) if name not in USUAL]
    if strange:
        raise ValueError(
            f"{caller()}: plans has {strange[0]!r}, which is none of {', '.join(map(repr, USUAL))}. Plans of your own "
            'have names: plans={"mine": plan}, meshes=[mesh].'
        )
    return {name: USUAL[name][0] for name in cast(Sequence[str], names)}


KINDS = ("loss", "metric", "gradient", "parameter", "buffer")


@dataclasses.dataclass(frozen=True)
class Proof:
    """One layout beside eager torch.

    Attributes:
        plan: Its name.
        mesh: Its axes with their sizes.
        dtype: In which both computed: "float64" where the rounding of "float32" hid too much; "float64, in part
            float32" where the model itself computes some of it in that.
        compared: All values; None where the layout does not fit the model or the batch.
        refused: Why it does not; else empty.
        need_not_fit: Whether it was tried as one of the usual layouts, and not asked for.

    Example:
        >>> import torch, torch_shard as ts
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> (row,) = ts.prove(torch.nn.Linear(4, 2), loss_fn, torch.ones(8, 4), plans="dp").rows
        >>> row.plan, row.mesh, row.dtype, row.worst("gradient").worst < 1e-5
        ('dp', '(batch=8)', 'float32', True)
    """

    plan: str
    mesh: str
    dtype: str
    compared: Comparison | None
    refused: str = ""
    need_not_fit: bool = False

    @property
    def holds(self) -> bool:
        """Whether every value is as close as rounding explains; what does not fit does not hold."""
        return self.compared is not None and not beyond(self.compared.rows, self.compared.tolerance)

    def worst(self, kind: str | None = None) -> Difference | None:
        """Give the largest difference; None if there is no such value.

        Args:
            kind: "loss", "metric", "gradient", "parameter" or "buffer"; None for all.
        """
        rows = self.compared.rows if self.compared is not None else ()
        return next((row for row in rows if kind in (None, row.kind)), None)  # the largest comes first


@dataclasses.dataclass(frozen=True)
class Proofs(InNotebooks):
    """Findings of `ts.prove`; print them with `rich.print` or `print`.

    Attributes:
        rows: One for each layout.
        reference: What the others are compared with: "eager torch", or "one device" if the loss draws random numbers.
        steps: How many each of them has trained.

    Example:
        >>> import torch, torch_shard as ts
        >>> found = ts.prove(
        ...     torch.nn.Linear(4, 2), lambda model, batch: model(batch).square().mean(), torch.ones(8, 4),
        ...     plans=["dp", "expert"], meshes=[ts.make_mesh(batch=2, model=2)],
        ... )
        >>> [(row.plan, row.holds, row.refused[:46]) for row in found.rows]
        [('dp', True, ''), ('expert', False, 'plans.expert: no entry of Linear holds several')]
    """

    rows: tuple[Proof, ...]
    reference: str
    steps: int

    @property
    def holds(self) -> bool:
        """Whether all hold: those that were asked for, and of the usual ones those that fit the model."""
        return not self._failed()

    def _failed(self) -> list[Proof]:
        failed = list[Proof]()
        for row in self.rows:
            may_not_fit = row.refused and row.need_not_fit
            if not row.holds and not may_not_fit:
                failed.append(row)
        return failed

    @error_prefix("raise_if_different")
    def raise_if_different(self) -> None:
        """Raise if a value of any layout is further from its reference than rounding explains.

        Raises:
            AssertionError: With the layouts, the names and how far they are apart.
        """
        if not (failed := self._failed()):
            return
        lines = [f"  {row.plan} on {row.mesh}: {_said(row)}" for row in failed]
        raise AssertionError(f"these layouts do not give the numbers of {self.reference}:\n" + "\n".join(lines))

    def __rich__(self) -> Table:
        kinds = [kind for kind in KINDS if any(row.worst(kind) for row in self.rows)]
        title = f"Largest differences from {self.reference} after {self.steps} step{'s' if self.steps != 1 else ''}"
        table = Table(title=title, caption="relative to the largest entry of the value")
        for column in ("plan", "mesh", *kinds, "in", ""):
            table.add_column(column, justify="right" if column in KINDS else "left", overflow="fold")
        for row in self.rows:
            sizes = list[str]()
            for kind in kinds:
                largest = row.worst(kind)
                sizes.append("" if largest is None else f"{largest.worst:.1e}")
            colour = "green" if row.holds else "yellow" if row.need_not_fit else "red"
            verdict = "holds" if row.holds else _said(row)
            table.add_row(row.plan, row.mesh, *sizes, "" if row.refused else row.dtype, verdict, style=colour)
        return table

    def __str__(self) -> str:
        return printed(self, 140)


def _said(row: Proof) -> str:
    """What is wrong with a row, in a line."""
    if row.compared is None:
        return f"does not fit: {row.refused.partition('. ')[0]}"
    first, *others = beyond(row.compared.rows, row.compared.tolerance)
    return f"{first.kind} {first.name} is {first.worst:.1e} apart" + f", and {len(others)} more" * bool(others)


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
    plans: Mapping[str, ShardingPlan | PlanFn] | Sequence[str] | None = None,
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
    refuse_meta(dict(model.named_parameters()))
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
            rows[at] = rows[at] if row.refused else row  # what float64 alone refuses says nothing of float32
    reference = next(row.compared.reference for row in rows if row.compared is not None)
    return Proofs(tuple(rows), reference, steps)


def _rows(training: Training, layouts: Sequence[Layout], *, is_usual: bool) -> tuple[list[Proof], Run]:
    """Train under each layout, for a row of the table or to say why it does not fit; and one of these runs."""
    rows, runs, errors = list[Proof](), list[Run](), list[Exception]()
    references: dict[int, tuple[str, list[Values], float, str]] = {}
    for number, (label, mesh, plan) in enumerate(layouts):
        about = describe_mesh(mesh)
        try:
            with quietly():
                resolved = plan_for(plan, training.model, mesh)
            num_microbatches = MICROBATCHES if resolved.pipeline else 1
            run = training.on(mesh, resolved, num_microbatches)
        except (ValueError, NotImplementedError) as error:
            errors.append(error)
            rows.append(Proof(label, about, "", None, " ".join(str(error).split()), need_not_fit=is_usual))
            continue

        # Which rows a microbatch has depends on the layout; without microbatches one reference is for all.
        key = -1 if num_microbatches == 1 else number
        if key not in references:
            references[key] = *run.reference(), *_limits(run)
            runs.append(run)
        name, reference, tolerance, dtype = references[key]
        comparison = compared(differences(reference, None, run.values), name, mesh, tolerance, reference)
        rows.append(Proof(label, about, dtype, comparison))
    if len(errors) == len(layouts):
        raise errors[0]
    return rows, runs[0]


def _limits(run: Run) -> tuple[float, str]:
    """How far values may be apart, of the largest entry, and in what they were computed, in words."""
    dtype = run.training.dtype
    if dtype == torch.float64:
        # Norms of transformers compute in float32, whatever the model has.
        replay = Replay(run.step.gradient_step, run.step.init(), run.step.put(run.training.batches[0]))
        with _Narrow() as narrow, torch.no_grad():
            replay.forward(next(iter(replay)))
        if narrow.is_narrow:
            return EXACT[torch.float32], "float64, in part float32"
    return EXACT.get(dtype) or rounding_of(dtype), str(dtype).removeprefix("torch.")
