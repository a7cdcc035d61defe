"""Every way to lay a model over devices, proved against eager torch in one call."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._common.caller import public
from torch_shard._common.dtypes import has_x64
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_count
from torch_shard._common.wrappers import check_module
from torch_shard._inspect.layouts import Layout, Recipe, layouts_of
from torch_shard._inspect.proofs import Proof, Proofs
from torch_shard._inspect.side_by_side import MakeOptimizer, keeping_gradients, train_in_torch, train_on_mesh
from torch_shard._loss import check_loss_fn
from torch_shard._optim import adamw, check_optimizer
from torch_shard._sharding import LossFn, ShardingPlan, describe_mesh, make_mesh
from torch_shard._train import (
    ROUNDING,
    Comparison,
    TrainStep,
    Values,
    difference_of,
    eager_loss,
    like_model,
    make_train_step,
)

logger = logging.getLogger(__name__)

EXACT = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of the largest entry: sums of some thousand terms in another order, through some layers and steps."""

_ADAMW = {"lr": 1e-3, "eps": 1e-5}
"""Adam divides a gradient by its size: with torch's eps of 1e-8, one that is only rounding becomes a whole step."""


@dataclasses.dataclass(frozen=True)
class _Training:
    """What is trained, the same for all layouts."""

    model: torch.nn.Module
    loss_fn: LossFn
    batches: Sequence[PyTree]
    optimizer: optax.GradientTransformation
    torch_optimizer: MakeOptimizer
    compute_dtype: torch.dtype | None

    @property
    def dtype(self) -> torch.dtype:
        """The one that rounds most."""
        at_work = {p.dtype for p in self.model.parameters() if p.is_floating_point()} | {self.compute_dtype}
        return max((d for d in at_work if d is not None), key=lambda d: torch.finfo(d).eps, default=torch.float32)

    def step_on(
        self, mesh: Mesh, plan: ShardingPlan, batch_spec: PartitionSpec | None = None, accumulate_steps: int = 1
    ) -> TrainStep:
        """A step for it."""
        options: dict[str, Any] = {"batch_spec": batch_spec, "compute_dtype": self.compute_dtype}
        options |= {"accumulate_steps": accumulate_steps}
        optimizer = keeping_gradients(self.optimizer)
        return make_train_step(self.model, self.loss_fn, optimizer, mesh=mesh, plan=plan, **options)

    @functools.cached_property
    def alone(self) -> TrainStep:
        """A step on one device."""
        mesh = make_mesh(jax.local_devices()[:1], topology=None, batch=1)
        return self.step_on(mesh, ShardingPlan({}, default=PartitionSpec()), PartitionSpec())

    def reference(self, *, in_torch: bool) -> list[Values]:
        """The training by eager torch, or by one device."""
        if in_torch:
            return train_in_torch(self.alone, self.batches, self.torch_optimizer)
        return train_on_mesh(self.alone, self.batches)

    def in_parts(self, step: TrainStep) -> list[Values]:
        """The training by eager torch in the microbatches of a step, which takes the same rows together."""
        return train_in_torch(step, self.batches, self.torch_optimizer)

    def copied(self) -> torch.nn.Module:
        """A copy of the model on the CPU."""
        return like_model(self.alone.export(self.alone.init()), self.model)

    @functools.cached_property
    def is_float32_in_part(self) -> bool:
        """Whether a loss in float64 computes some of it in float32 itself, as the norms of transformers do."""
        if self.dtype != torch.float64:
            return False
        model = self.copied()
        with _Narrow() as found, torch.no_grad(), torch.random.fork_rng(devices=[]):
            eager_loss(self.alone, model, self.batches[0])
        return found.is_narrow

    @property
    def tolerance(self) -> float:
        """How far values may be apart, of the largest entry."""
        dtype = torch.float32 if self.is_float32_in_part else self.dtype
        return EXACT.get(dtype, ROUNDING.get(dtype, 1e-4))

    @property
    def label(self) -> str:
        """In what it computes, in words."""
        return "float64, in part float32" if self.is_float32_in_part else str(self.dtype).removeprefix("torch.")

    def in_float64(self) -> "_Training":
        """The same with a copy of the model and the batches in float64, for where 64 bits are enabled."""

        def widened(leaf: PyTree) -> PyTree:
            return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf

        batches = [torch_pytree.tree_map(widened, batch) for batch in self.batches]
        return dataclasses.replace(self, model=self.copied().double(), batches=batches)


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
    if (optimizer is None) != (torch_optimizer is None):
        raise ValueError("prove: give optimizer and torch_optimizer both, for the same rule, or neither.")
    if optimizer is not None:
        check_optimizer(optimizer)
        check_call("torch_optimizer", torch_optimizer, "params", hint="functools.partial(torch.optim.SGD, lr=0.1).")
    rules = (optimizer or adamw(**_ADAMW), torch_optimizer or functools.partial(torch.optim.AdamW, **_ADAMW))
    training = _Training(model, loss_fn, [batch] * steps, *rules, compute_dtype)
    layouts = layouts_of(plans, meshes, batch_spec)
    with jax.enable_x64(training.dtype == torch.float64 or has_x64()):
        rows, is_random = _proved(training, layouts)
    again = [at for at, row in enumerate(rows) if not row.holds and not row.refused]
    if again and not is_random and training.dtype == torch.float32:
        exact = _in_float64(training, [layouts[at] for at in again])
        for at, row in zip(again, exact, strict=False):  # none, if the loss cannot be repeated
            rows[at] = row
    return Proofs(tuple(rows), "one device" if is_random else "eager torch", steps)


def _proved(training: _Training, layouts: Sequence[Layout]) -> tuple[list[Proof], bool]:
    """The layouts, and whether random numbers were drawn."""
    runs = [_run(training, layout) for layout in layouts]
    errors = [run for run in runs if not isinstance(run, _Run)]
    if len(errors) == len(layouts):
        raise errors[0]
    is_random = any(isinstance(run, _Run) and run.is_random for run in runs)
    whole = training.reference(in_torch=not is_random)
    about = training.tolerance, training.label, "one device" if is_random else "eager torch"
    rows = list[Proof]()
    for layout, run in zip(layouts, runs, strict=True):
        in_parts = run.step if isinstance(run, _Run) and layout.accumulate_steps > 1 else None
        rows.append(_row(layout, run, whole if in_parts is None else training.in_parts(in_parts), about))
    return rows, is_random


def _row(layout: Layout, run: "_Run | Exception", reference: list[Values], about: tuple[float, str, str]) -> Proof:
    """A row of the table; about is the tolerance, in what was computed, and what the reference is."""
    name, mesh, (tolerance, dtype, against) = layout.name, describe_mesh(layout.mesh), about
    if not isinstance(run, _Run):
        return Proof(name, mesh, "", None, " ".join(str(run).split()), need_not_fit=layout.is_usual)
    rows = [difference_of(key, reference, None, run.values) for key in {**reference[-1], **run.values[-1]}]
    losses = tuple(float(values["loss", "loss"]) for values in reference)
    rows = tuple(sorted(rows, key=lambda row: -row.worst))
    return Proof(name, mesh, dtype, Comparison(rows, against, f"mesh {mesh}", tolerance, losses))


@dataclasses.dataclass(frozen=True)
class _Run:
    """What training under a layout gave, and the step."""

    values: list[Values]
    step: TrainStep

    @property
    def is_random(self) -> bool:
        """Whether it drew random numbers."""
        return self.step.draws_random


def _run(training: _Training, layout: Layout) -> _Run | Exception:
    """Train under a layout; why it does not fit, if it does not."""
    try:
        plan = layout.plan_for(training.model)
        step = training.step_on(layout.mesh, plan, layout.batch_spec, layout.accumulate_steps)
        return _Run(train_on_mesh(step, training.batches), step)
    except (ValueError, NotImplementedError) as error:
        return error


def _in_float64(training: _Training, layouts: Sequence[Layout]) -> list[Proof]:
    """The same in float64; none if the loss cannot be repeated."""
    try:
        wide = training.in_float64()
        with jax.enable_x64(True):
            return _proved(wide, layouts)[0]
    except Exception:
        logger.info("prove: the loss cannot be repeated in float64.", exc_info=True)
        return []
