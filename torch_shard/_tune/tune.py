"""`tune`: which mesh, plan and options a step is to have, known before there is a pod."""

# JAX, PyTorch and optax annotate some of their functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
import torch
from torch import nn

from torch_shard._common.caller import caller, public
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import check_directory, check_kind, check_module
from torch_shard._entries import LossFn, holdings
from torch_shard._loss import check_loss_fn, flatten_batch
from torch_shard._sharding import make_mesh
from torch_shard._train import TrainStep, make_train_step
from torch_shard._tune.search import MOST, Search
from torch_shard._tune.tuning import Choice, Tuning, budgets_of

CHOSEN = ("mesh", "plan", "optimizer_plan")
"""Options that are found; others may be given."""

ESTIMATES = (
    "These devices' compiler counts no cycles: compute is the larger of flops over the peak and memory traffic over "
    "the bandwidth, and everything that is received counts as exposed. Memory and bytes received are the compiler's."
)


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

    What a user takes who does not tune, `plans.fsdp` with all devices on the axis `batch`, is compiled first, as
    `step.preview` does it, and is the one to beat. If it does not fit, `remat="dots"`, `remat="block"` and `offload`
    are tried. Then come other meshes and recipes, and layers in loops or one by one: eight candidates in all, sorted by
    the time that the compiler says. Nothing is placed on a device, and nothing runs, unless `measure` asks for it.
    Ctrl-C ends the search with the best so far. The logger `torch_shard` tells what is compiled, at level INFO.

    Args:
        model: As `make_train_step` takes it, as the next two; it may be on the meta device.
        loss_fn: The loss.
        optimizer: Of torch or optax.
        batch: The whole batch of a step, or shapes of it: tensors on the meta device, `jax.ShapeDtypeStruct`s.
        topology: Accelerators that this machine need not have, such as `"v5e:16x16"`, as `make_mesh` takes it.
        devices: Or devices of JAX. By default all that it sees.
        minutes: For the search. The default is always compiled; no other begins when they are over.
        cache: A directory in which what was compiled is noted, so that the same call later is fast, or goes on. Its
            files are data, of which nothing is executed.
        measure: Whether the three best and the default are run for ten steps each, on real devices, with a model and a
            batch that have values.
        **step_options: Of `make_train_step`, to be taken as they are: `compute_dtype`, `accumulate_steps`. A choice
            that is made here otherwise (`remat`, `scan_layers`) is then no choice.

    Returns:
        A `Tuning`: printed, a table; `found.best.options` for `make_train_step`; `found.save(path)`.

    Raises:
        TypeError: An argument is of the wrong kind, or `make_train_step` has no such option.
        ValueError: There is no such topology; the batch divides over no mesh; none of the candidates fits.

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
    values = [*holdings(model).all.values(), *flatten_batch(batch)[0]]
    if measure and any(isinstance(v, jax.ShapeDtypeStruct) or getattr(v, "is_meta", False) for v in values):
        raise ValueError(f"{caller()}: measure=True runs steps: give a model and a batch that have values, not shapes.")
    directory = None if cache is None else check_directory("cache", cache)
    deadline = time.monotonic() + 60 * minutes
    mesh = make_mesh(devices, topology=topology, batch=-1)
    ordered = sorted(mesh.devices.flat, key=lambda device: device.id)
    search = Search(
        functools.partial(make_train_step, model, loss_fn, optimizer),
        model,
        batch,
        devices=ordered,
        options=step_options,
        directory=directory,
        deadline=deadline,
    )
    search.run()

    where = topology or f"{len(ordered)} x {getattr(ordered[0], 'device_kind', ordered[0].platform)}"
    tuning = _tuning(search, where)
    return _measured(tuning, search) if measure else tuning


def _tuning(search: Search, where: str) -> Tuning:
    choices = list[Choice]()
    for candidate in search.ranking():
        found = search.measured[candidate]
        choices.append(Choice(search.options_of(candidate), budgets_of(found), candidate, found))
    notes = tuple(_notes(search))
    tuning = Tuning(tuple(choices), search.pruned, notes, where, search.limit, search.options, search.model)
    if not search.not_reached and not search.interrupted and not any(map(search.fits, search.measured)):
        raise ValueError(
            f"{caller()}: all candidates were compiled, and none fits. Take more devices, a smaller batch, "
            f"accumulate_steps=2 or more, or compute_dtype=torch.bfloat16.\n{tuning}"
        )
    return tuning


def _notes(search: Search) -> Iterator[str]:
    if search.interrupted:
        yield "Interrupted: this is the best so far."
    if search.not_reached:
        names = "; ".join(map(str, search.not_reached[: MOST - len(search.measured)]))
        yield f"Not compiled for want of time: {names}. Give more minutes."
    if search.chip.clock is None:
        yield ESTIMATES


def _check(minutes: float, measure: bool, options: Mapping[str, Any], topology: str | None) -> None:
    check_kind("minutes", minutes, int | float)
    if not 0 < minutes < math.inf:
        raise ValueError(f"{caller()}: minutes must be a positive number, got {minutes!r}.")
    if measure and topology is not None:
        raise ValueError(
            f"{caller()}: measure=True runs steps, and nothing can run on topology={topology!r}, whose devices only "
            "compile. Leave one of them out."
        )
    known = set(inspect.signature(make_train_step).parameters) - set(CHOSEN)
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"{caller()}: {', '.join(unknown)}: make_train_step has no such option, or it is what is found here, as "
            f"{', '.join(CHOSEN)} are. Leave it out, or use step.preview."
        )


BEST, STEPS = 3, 10


def _measured(tuning: Tuning, search: Search) -> Tuning:
    """Run the best choices and the default, and order them by the clock."""
    ran, others = list[Choice](), list[Choice]()
    for number, choice in enumerate(tuning.choices):
        is_asked = number < BEST or choice.candidate == search.default
        if is_asked and search.fits(choice.candidate):
            seconds = _seconds(search.step(choice.candidate).apart(), search.batch)
            ran.append(dataclasses.replace(choice, measured=seconds))
        else:
            others.append(choice)
    ran.sort(key=lambda choice: choice.measured or 0.0)
    return dataclasses.replace(tuning, choices=(*ran, *others))


def _seconds(step: TrainStep, batch: PyTree) -> float:
    """The median of some steps after the first."""
    state, placed, times = step.init(seed=0), step.put(batch), list[float]()
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        state, metrics = step(state, placed)
        jax.block_until_ready((state.params, metrics))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
