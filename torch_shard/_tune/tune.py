"""`tune`: which mesh, plan and options a step is to have, known before there is a pod."""

# JAX, PyTorch and optax annotate some of their functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import inspect
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
import torch
from torch import nn

from torch_shard._common.caller import caller, public
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import check_directory, check_kind
from torch_shard._common.wrappers import check_module
from torch_shard._device import refuse_meta
from torch_shard._loss import check_loss_fn, flatten_batch
from torch_shard._sharding import LossFn, holdings, make_mesh
from torch_shard._train import make_train_step
from torch_shard._tune.cache import Cache
from torch_shard._tune.measure import measured_choices
from torch_shard._tune.search import Search
from torch_shard._tune.task import Task
from torch_shard._tune.tuning import Tuning

CHOSEN = ("mesh", "plan", "optimizer_plan")
"""Options that are found; others may be given."""

SECONDS = (2.0, 0.05)
"""A compilation for TPUs takes at least so long, and so long for each operator: one at a time, on a fast core."""


@public
def tune(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | torch.optim.Optimizer,
    batch: PyTree,
    *,
    topology: str | None = None,
    devices: Sequence[Device] | None = None,
    minutes: float = 10,
    cache: str | os.PathLike[str] | None = None,
    measure: bool = False,
    **step_options: Any,
) -> Tuning:
    """Find the mesh, the plan and the options with which a step takes the least time and fits.

    Every factorisation of the devices with every recipe, `remat`, number of microbatches and way to run layers is
    judged by arithmetic; the most promising are compiled for the devices, as `step.preview` does it. Where many layers
    run one by one and are proved to be one program, two and three of them are compiled, and the whole follows. Nothing
    is placed on a device, and nothing runs, unless `measure` asks for it. Ctrl-C ends the search with the best so far;
    a compilation that is under way then goes on in its thread, and a process ends after it.

    Args:
        model: As `make_train_step` takes it, as the next two; it may be on the meta device.
        loss_fn: The loss.
        optimizer: Of torch or optax.
        batch: The whole batch of a step, or shapes of it: tensors on the meta device, `jax.ShapeDtypeStruct`s.
        topology: Accelerators that this machine need not have, such as `"v5e:16x16"`, as `make_mesh` takes it.
        devices: Or devices of JAX. By default all that it sees.
        minutes: For the search; what is compiled when they are over is not waited for.
        cache: A directory in which what was compiled is noted, so that the same call later is fast, or goes on. Its
            files are data, of which nothing is executed.
        measure: Whether the three best are run for ten steps each, on real devices, with a model and a batch that have
            values.
        **step_options: Of `make_train_step`, to be taken as they are: `compute_dtype`, `clip_grad_norm`. A choice that
            is made here otherwise (`remat`, `scan_layers`, `accumulate_steps`) is then no choice.

    Returns:
        A `Tuning`: printed, a table; `found.best.options` for `make_train_step`; `found.save(path)`.

    Raises:
        TypeError: An argument is of the wrong kind, or `make_train_step` has no such option.
        ValueError: There is no such topology; the batch divides over no mesh; the model fits nowhere; the minutes are
            too few for one compilation.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> model, batch = torch.nn.Linear(64, 32), torch.empty(2, 64, device="meta")
        >>> two = ts.make_mesh(batch=2).devices.flat[:2]
        >>> found = ts.tune(model, loss_fn, optax.adam(0.1), batch, devices=two, minutes=1)
        >>> step = ts.make_train_step(model, loss_fn, optax.adam(0.1), **found.best.options)
    """
    model = check_module("model", model)
    check_loss_fn(loss_fn)
    _check(minutes, measure, step_options, topology)
    if measure:
        _refuse_without_values(model, batch)
    directory = None if cache is None else check_directory("cache", cache)
    deadline = time.monotonic() + 60 * minutes
    mesh = make_mesh(devices, topology=topology, batch=-1)
    found = sorted(mesh.devices.flat, key=lambda device: device.id)
    task = Task(model, loss_fn, optimizer, batch, devices=found, options=step_options)
    pruning = task.prune()
    search = task.search(pruning, Cache(directory, task.about()), deadline)
    _refuse_too_short(search, minutes, pruning.facts.operators if mesh.devices.flat[0].platform == "tpu" else 0)
    search.run()
    where = topology or f"{len(found)} x {getattr(found[0], 'device_kind', found[0].platform)}"
    tuning = task.tuning(search, pruning, where, minutes)
    return measured_choices(tuning, model, loss_fn, optimizer, batch=batch) if measure else tuning


def _check(minutes: float, measure: bool, options: Mapping[str, Any], topology: str | None) -> None:
    check_kind("minutes", minutes, int | float)
    check_kind("measure", measure, bool)
    if isinstance(minutes, bool) or not 0 < minutes < math.inf:
        raise ValueError(f"{caller()}: minutes must be a positive number, got {minutes!r}.")
    if measure and topology is not None:
        raise ValueError(
            f"{caller()}: measure=True runs steps, and nothing can run on topology={topology!r}, whose devices only "
            "compile. Leave one of them out."
        )
    known = inspect.signature(make_train_step).parameters
    if chosen := [name for name in options if name in CHOSEN]:
        raise TypeError(f"{caller()}: {', '.join(chosen)} is what it finds. Leave it out, or use step.preview.")
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{caller()}: make_train_step has no option {', '.join(unknown)}.")


def _refuse_without_values(model: nn.Module, batch: PyTree) -> None:
    """Say before the search that nothing could run."""
    refuse_meta(holdings(model).all)
    leaves, _ = flatten_batch(batch)
    if any(getattr(leaf, "is_meta", False) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(f"{caller()}: measure=True runs steps: give a batch that has values, not its shapes.")


def _refuse_too_short(search: Search, minutes: float, operators: int) -> None:
    """Say before the search that not even one compilation would end in time."""
    least = SECONDS[0] + SECONDS[1] * operators
    left = search.deadline - time.monotonic()
    if (left > 0 and left >= least * bool(operators)) or any(search.cache.read(c) for c in search.estimates):
        return
    raise ValueError(
        f"{caller()}: minutes={minutes:g} are too few: of them {max(left, 0):.0f} s are left for compiling, and one "
        f"compilation of this step takes at least {least:.0f} s, and several times that on a busy machine. Give more "
        "minutes; with cache= the same call goes on later."
    )
