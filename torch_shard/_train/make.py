"""The makers of the steps that train, evaluate and apply, with what their options mean."""

# optax has no stubs.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import optax
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.autocast_policy import MixedPrecision
from torch_shard._common.caller import near_misses, public
from torch_shard._entries import LossFn
from torch_shard._scan import Remat, ScanLayers
from torch_shard._sharding import PlanFn, ShardingPlan, plan_for
from torch_shard._train.apply_step import ApplyFn, ApplyStep
from torch_shard._train.options import Offload, StepOptions
from torch_shard._train.step import EvalStep
from torch_shard._train.train_step import TrainStep


@near_misses
@public
def make_train_step(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | torch.optim.Optimizer,
    *,
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    optimizer_plan: ShardingPlan | None = None,
    trainable: str | Sequence[str] | None = None,
    batch_spec: PartitionSpec | Mapping[str, PartitionSpec] | None = None,
    local_batches: bool = False,
    compute_dtype: torch.dtype | None = None,
    mixed_precision: MixedPrecision | None = None,
    scan_layers: ScanLayers = "auto",
    remat: Remat | int = "none",
    offload: Offload | Sequence[Offload] | None = None,
    accumulate_steps: int = 1,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    ema: float | None = None,
    moment_dtype: torch.dtype | None = None,
    watch: str | Sequence[str] | None = None,
    split_activations: bool = True,
    look_again: bool = True,
    compile_cache: str | os.PathLike[str] | None = None,
    compiled: str | os.PathLike[str] | None = None,
) -> TrainStep:
    """Make the function that trains `model` by one step, as one compiled program.

    The guides say more: plans, optimizers, the loss and accumulation, layers and remat, data of several hosts.

    Args:
        model: Any module, on the CPU or the jax device. It is read, never changed. Its training flags are read at each
            call: after `model.eval()` the step runs in eval mode.
        loss_fn: `loss_fn(model, batch)`, plain torch. It returns a scalar tensor, a pair of it and a dict of metrics,
            or a dict or record with an entry `loss`, whose other entries are metrics if they are numbers or tensors of
            one element.
        optimizer: An optimizer of `torch.optim` for parameters of the model, with its groups, whose numbers (`lr`,
            `weight_decay`, `betas`) are read at each call; or an optax gradient transformation.
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: How each parameter and buffer is split, by name; or a function of `(model, mesh)` that says it, such as
            `ts.plans.fsdp`.
        optimizer_plan: The same for what the optimizer keeps of each parameter, if that is split further (ZeRO-1). By
            default it is split like the parameter.
        trainable: Names or globs, as in a plan, of the parameters that this step trains; by default all that require
            gradients. Steps for other parts of the model, with losses and optimizers of their own, take the same state
            in turn (GANs).
        batch_spec: How each leaf of a batch is split. By default the leading dim over the mesh axis `batch`. Of leaves
            that are not split, or otherwise, by their names: `{"targets.**": P()}`, and the others by default.
        local_batches: True if each process gives only the rows of its own devices; False if each gives the whole batch.
            See the guide on data of several hosts.
        compute_dtype: `torch.bfloat16` for mixed precision; parameters and optimizer keep their dtype.
        mixed_precision: What is in `compute_dtype`, which is then bfloat16 by default. `"params"`, as where only
            `compute_dtype` is given: every parameter where it is used, and so all activations, like FSDP2's
            `MixedPrecisionPolicy(param_dtype=...)`; norms and losses compute in float32. `"autocast"`: the factors of
            products, by the policy of `torch.autocast("cuda")`.
        scan_layers: Run repeated layers as one loop, so that the time to compile does not grow with depth. `"auto"`:
            three layers or more that are proved to be one program, on TPU with `remat="none"` more than 16 (64 of
            convolutions), as fewer are faster one by one there; True: two or more, and an error if there is no loop;
            False: never. `step.report()` says which.
        remat: What the backward pass of repeated layers computes again: `"none"`; `"dots"`, all but matrix products;
            `"block"`, all but each layer's inputs; or a number of bytes per device, for the first of these that fits.
        offload: What lies in the host's memory while the device does not need it. `"optimizer"`: the moments of
            matrices, brought in and sent back a layer at a time (of optax, all layers of a kind of matrix at a time).
            `"activations"`: what repeated layers keep for their backward pass, by `remat`. Or both, `("optimizer",
            "activations")`. The numbers are the same, up to rounding; `step.preview(batch)` says what lies where, and
            what the transfers take.
        accumulate_steps: Number of microbatches that each batch is taken in, within one program. The loss is the mean
            of theirs; a metric that is not a floating-point scalar comes as `(accumulate_steps, ...)`. Each device cuts
            its own rows: a loss that is no mean over rows depends on the mesh.
        clip_grad_norm: Scale the gradients so that their global L2 norm is at most this, as
            `torch.nn.utils.clip_grad_norm_` does. `metrics["grad_norm"]` is the norm before.
        clip_grad_value: Clamp each entry of the gradients to at most this, as `clip_grad_value_` does.
        ema: Keep an exponential moving average of the parameters, from their first values on: after each step
            `ema * average + (1 - ema) * parameter`. `step.averaged(state)` and `step.export(state, ema=True)` have it.
            It has the dtype of the parameter, as in `torch.optim.swa_utils`: of one in bfloat16, 0.99 and more hardly
            move it. Keep such parameters in float32, with `compute_dtype=torch.bfloat16`.
        moment_dtype: `torch.bfloat16` keeps moments in half the memory: `exp_avg`, `exp_avg_sq`, `mu`, `nu` and all
            else that the optimizer keeps of a parameter in its shape, but for copies of it. Updates are computed in
            float32; what is stored is rounded up or down at random, by keys of the state that no loss draws from.
            Counts, the rows and columns of Adafactor (but one in its parameter's shape, as `n x 1`), and float64 stay.
        watch: Names or globs of modules (`"layers.*"`), whose norms are metrics, which `fit` logs: `grad_norm/MODULE`,
            before clipping, and `update_norm/MODULE`.
        split_activations: Keep activations split over the axes of the batch where parameters are, too (FSDP). It
            changes speed and memory, and no number beyond rounding.
        look_again: Capture the loss once more before the second call of a program, and before the 11th, 101st, ..., and
            raise where it is another function by then: it counts, draws in Python or reads a clock. Nothing is
            compiled for it.
        compile_cache: A directory in which compiled programs are kept for the next process. Any number of processes
            may share it. Trust it as you trust code. Not used for several CPU devices.
        compiled: A file of `step.save_compiled`, from which this step starts: XLA compiles nothing at its first call. A
            file of another step is refused, with what differs, and so is a batch of other shapes. Trust it as you trust
            code.

    Returns:
        A `TrainStep`: `state = step.init(seed=0)`, `state, metrics = step(state, batch)`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: Nothing is trainable, the plan does not fit the model and the mesh, or an option has no such value.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> state, metrics = step(step.init(seed=0), torch.ones(8, 4))
        >>> sorted(metrics)
        ['grad_norm', 'loss']
    """
    options = StepOptions(
        mesh=mesh,
        plan=plan_for(plan, model, mesh),
        optimizer_plan=optimizer_plan,
        trainable=trainable,
        batch_spec=batch_spec,
        local_batches=local_batches,
        compute_dtype=compute_dtype,
        mixed_precision=mixed_precision,
        scan_layers=scan_layers,
        remat=remat,
        offload=offload,
        accumulate_steps=accumulate_steps,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        ema=ema,
        moment_dtype=moment_dtype,
        watch=watch,
        split_activations=split_activations,
        look_again=look_again,
        compile_cache=compile_cache,
        compiled=compiled,
    )
    return TrainStep(model, loss_fn, optimizer, options)


@near_misses
@public
def make_eval_step(
    model: torch.nn.Module,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    batch_spec: PartitionSpec | Mapping[str, PartitionSpec] | None = None,
    local_batches: bool = False,
    compute_dtype: torch.dtype | None = None,
    mixed_precision: MixedPrecision | None = None,
    scan_layers: ScanLayers = "auto",
    compile_cache: str | os.PathLike[str] | None = None,
    compiled: str | os.PathLike[str] | None = None,
) -> EvalStep:
    """Make the function that evaluates `loss_fn` in eval mode, without gradients, as one compiled program.

    Args:
        model: The module that the states belong to; its own training flags are left as they are.
        loss_fn: `loss_fn(model, batch)`, plain torch; returns what `make_train_step` takes.
        mesh: Devices with Auto axes, from `make_mesh`; those of the states.
        plan: Which parameter and buffer is split how, by name; or a function of `(model, mesh)` that says it.
        batch_spec: How each leaf of a batch is split (leaves of lower rank take the first entries). By default the
            leading dim over the mesh axis `batch`.
        local_batches: Of several processes, each gives the rows of its own devices alone, as many as each other one.
        compute_dtype: `torch.bfloat16` for mixed precision, as `make_train_step` takes it.
        mixed_precision: As `make_train_step` takes it.
        compile_cache: A directory in which compiled programs are kept for the next process. Not used for several CPU
            devices.
        compiled: A file of this step's `save_compiled`, as `make_train_step` takes it.
        scan_layers: Run repeated layers as one loop: `"auto"`, where it is proved to mean the same; True, or it is an
            error; False, never. States stored either way are accepted. (Nothing is kept for a backward pass, so
            there is no `remat`; and a batch comes as it is to be evaluated, so there is no `accumulate_steps`.)

    Returns:
        An `EvalStep`: `metrics = evaluate(state, batch)` with a `TrainState`, which is not donated.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The plan does not fit the model and the mesh, or an option has no such value.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> model, mesh, plan = torch.nn.Linear(4, 1), ts.make_mesh(batch=1), ts.ShardingPlan({}, default=P())
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> state = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=mesh, plan=plan).init(seed=0)
        >>> evaluate = ts.make_eval_step(model, loss_fn, mesh=mesh, plan=plan)
        >>> sorted(evaluate(state, torch.ones(8, 4)))
        ['loss']
    """
    options = StepOptions(
        mesh=mesh,
        plan=plan_for(plan, model, mesh),
        batch_spec=batch_spec,
        local_batches=local_batches,
        compute_dtype=compute_dtype,
        mixed_precision=mixed_precision,
        scan_layers=scan_layers,
        compile_cache=compile_cache,
        compiled=compiled,
    )
    return EvalStep(model, loss_fn, options)


@near_misses
@public
def make_apply(
    model: torch.nn.Module,
    *,
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    fn: ApplyFn | None = None,
    batch_spec: PartitionSpec | Mapping[str, PartitionSpec] | None = None,
    local_batches: bool = False,
    compute_dtype: torch.dtype | None = None,
    mixed_precision: MixedPrecision | None = None,
    scan_layers: ScanLayers = "auto",
    compile_cache: str | os.PathLike[str] | None = None,
    compiled: str | os.PathLike[str] | None = None,
) -> ApplyStep:
    """Make the forward pass of `model` in eval mode, without gradients, as one compiled program on a mesh.

    Args:
        model: Any module; its own training flags are left as they are.
        mesh: Devices with Auto axes, from `make_mesh`; those of the states, if there are any.
        plan: Which parameter and buffer is split how, by name; or a function of `(model, mesh)` that says it.
        fn: `fn(model, batch)`, plain torch; returns tensors in containers. By default `model(batch)`, or
            `model(*batch)` of a tuple or list, or `model(**batch)` of a mapping.
        batch_spec: How each leaf of a batch is split (leaves of lower rank take the first entries). By default the
            leading dim over the mesh axis `batch`.
        local_batches: Of several processes, each gives the rows of its own devices alone, as many as each other one.
        compute_dtype: `torch.bfloat16` for mixed precision, as `make_train_step` takes it.
        mixed_precision: As `make_train_step` takes it.
        scan_layers: Run repeated layers as one loop: `"auto"`, where it is proved to mean the same; True, or it is an
            error; False, never.
        compile_cache: A directory in which compiled programs are kept for the next process. Not used for several CPU
            devices.
        compiled: A file of this step's `save_compiled`, as `make_train_step` takes it.

    Returns:
        An `ApplyStep`: `outputs = apply(state, batch)` with a `TrainState`, which is not donated, or `apply(batch)`
        with the present values of the module. `apply.export_program(batch)` is it as StableHLO (`jax.export`).

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The plan does not fit the model and the mesh, or an option has no such value.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> model = torch.nn.Linear(4, 2)
        >>> apply = ts.make_apply(model, mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()))
        >>> apply(torch.ones(8, 4)).shape
        (8, 2)
    """
    options = StepOptions(
        mesh=mesh,
        plan=plan_for(plan, model, mesh),
        batch_spec=batch_spec,
        local_batches=local_batches,
        compute_dtype=compute_dtype,
        mixed_precision=mixed_precision,
        scan_layers=scan_layers,
        compile_cache=compile_cache,
        compiled=compiled,
    )
    return ApplyStep(model, fn, options)
