"""The training loop: steps, progress, metrics, evaluation, checkpoints, and an orderly end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import torch
from rich.console import Console
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from torch_shard._common.caller import near_misses, public
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count, check_directory, check_kind, check_seed
from torch_shard._fit.callbacks import Callback, Callbacks, Run
from torch_shard._fit.data import Ahead, Batches, check_samplers, reliable_len
from torch_shard._fit.dataset import EvaluationRows, Rows, TrainingRows, as_rows, evaluation_rows
from torch_shard._fit.loop import Evaluation, Loop, Settings
from torch_shard._fit.reports import Bar, Compute, MetricsLog, Predictions, Reports
from torch_shard._fit.schedule import Schedule
from torch_shard._hosts import Gate, compare, is_shared
from torch_shard._io import Checkpointer
from torch_shard._state import TrainState
from torch_shard._train import ApplyFn, EvalStep, Step, TrainStep

logger = logging.getLogger(__name__)


@near_misses
@public
def fit(
    step: TrainStep,
    state: TrainState | None,
    loader: Iterable[PyTree] | Callable[[int], Iterable[PyTree]] | Rows | Dataset[Any] | Sequence[Any],
    *,
    steps: int,
    batch_size: int | None = None,
    scheduler: LRScheduler | None = None,
    schedule_by: str | None = None,
    eval_loader: Iterable[PyTree] | Rows | Dataset[Any] | None = None,
    eval_every: int | None = None,
    eval_step: EvalStep | None = None,
    predict: ApplyFn | None = None,
    compute_metrics: Compute | None = None,
    checkpointer: Checkpointer | None = None,
    log: str | os.PathLike[str] | None = None,
    log_every: int = 1,
    on_bad_step: str = "raise",
    skip_grad_norm: float | None = math.inf,
    seed: int = 0,
    prefetch: int = 2,
    prove_steps: int = 0,
    check_replicas_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | Console = True,
) -> TrainState:
    """Train until the state has seen `steps` batches, and go on where an earlier call was cut off.

    Args:
        step: From `make_train_step`.
        state: Where to begin; donated. If `checkpointer` has a checkpoint that has seen more batches, that is taken
            instead. None stands for the checkpoint, and without one for `step.init(seed=0)`.
        loader: Batches on the host, of global sizes (with `local_batches=True`, the rows of this process's devices): an
            iterable that starts anew with each `iter` (a list, a torch `DataLoader` with or without workers), taken
            epoch after epoch, or a function from a position (the number of batches seen) to an iterable of those that
            follow. An iterator works for a run from its beginning. JAX is multithreaded, so start workers by
            `DataLoader(..., multiprocessing_context="forkserver")`: after a plain fork, of which JAX warns, they must
            not touch JAX. Or, with `batch_size`, a dataset: what has `len(dataset)` and `dataset[index]`, the same in
            all processes, of which each reads the rows of its devices.
        steps: Number of batches of the whole run, not of this call.
        batch_size: Rows of a batch, over all processes, where `loader` is a dataset. It is shuffled for each epoch, and
            an epoch's last batch is filled up with its first rows, both as by a `DistributedSampler`; `Rows` has other
            ways, and workers.
        scheduler: Of the optimizer of torch that the step was made with; it goes on from where it stands. A resumed run
            gives it, and the groups of the optimizer, the numbers of the checkpoint, as `load_state_dict` would.
        schedule_by: When it is stepped: after each `"step"`, as by default; after each `"epoch"` of the loader; or
            after each evaluation with the metric of this name, as `ReduceLROnPlateau` needs it (default `"loss"`).
        eval_loader: Batches for evaluation, all of them each time: at the end, and every `eval_every` batches. Loss and
            metrics are means over the batches, in which each weighs as many rows as it has: of a `loss_fn` that is a
            mean over rows, the mean over all rows. The last batch may have any size: one that does not divide over the
            mesh is evaluated whole on each device, for one compilation more. Or a dataset, taken in order
            in batches of `batch_size`; a list may be of rows as `loader` has them, or of batches.
        eval_every: Batches from one evaluation to the next; None for the end alone.
        eval_step: By default the loss of `step` in eval mode.
        predict: `predict(model, batch)`, plain torch, in eval mode: what `compute_metrics` takes of each batch of an
            evaluation, such as `(model(x), y)`.
        compute_metrics: What is no mean over batches (F1, AUROC). A function of all predictions, which gives a dict of
            numbers: it gets what `predict` returns, joined along the rows, as CPU tensors, on each process, those in 16
            bits as float32. Or an object of torchmetrics, whose `update` gets what `predict` returns for each batch.
        checkpointer: Saves every `checkpointer.every` batches, at the end, when `SIGTERM` or `SIGINT` asks to stop, and
            when the loader or a step fails.
        log: A directory for `metrics.jsonl` and TensorBoard's event files, to which a resumed run adds. Of several
            processes, the first one writes it, and shows the bar.
        log_every: Batches from one record to the next.
        on_bad_step: What to do where the loss, a gradient, the gradient's norm or what would be a buffer is not finite,
            or that norm is larger than `skip_grad_norm`. The state is kept as before that batch in each case: `"raise"`
            a `BadStepError`, `"explain"` it there as `find_nan` does, and keep the batch for `torch-shard replay`,
            `"stop"` and return it, with a warning, or `"skip"` the batch and go on, with a warning.
            Only a skipped batch counts as seen: after the others a resumed run meets it again.
        skip_grad_norm: The largest global norm that is no accident. None takes every step unseen, which spares a pass
            over the state.
        seed: Of the order of the data, from 0 to 2**32 - 1: each epoch of `loader` draws from `(seed, epoch)`, whatever
            was drawn before.
        prefetch: Number of batches to put on the mesh ahead.
        prove_steps: So many steps of this call are first compared with eager torch on the CPU, as `step.prove` does,
            by its own random numbers. A difference ends the run before that step. Steps after them cost nothing more.
        check_replicas_every: Batches from one check that devices and processes hold the same values, where they should
            (`assert_replica_integrity` of the state, which copies it to the host), to the next; None for none.
        callbacks: `Callback` objects, which are told of steps, evaluations, checkpoints and the end.
        progress: True shows a bar; a rich console shows it there.

    Returns:
        The state that has seen `steps` batches.

    Raises:
        AssertionError: A step of `prove_steps` differs from eager torch; the state before it is saved. Or
            `check_replicas_every` has found replicas that differ; that state is not saved.
        BadStepError: See `on_bad_step`.
        KeyboardInterrupt: `SIGINT` came, and the state is saved. (Without `checkpointer` signals are left alone.)
        SystemExit: `SIGTERM` came, and the state is saved; with status 143.
        TypeError: An argument is of the wrong kind.
        NotADirectoryError: `log` is a file.
        RuntimeError: Another process has failed; the message has its error. If all could come to one step, it is saved.
        ValueError: An option has no such value, or needs another; `steps` is behind the state, or the loader ends too
            early. Or processes do not agree: on arguments, or on what `make_train_step` compares.

    Notes:
        A run that is cut off at any batch and resumed on the same mesh gives the same losses, bit for bit: parameters,
        moments, buffers, keys and the position in the data are in the state, and the batches of the epoch that were
        seen are drawn again. `loader` as a function of the position spares that.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
        >>> state = ts.fit(step, step.init(seed=0), data, steps=20, progress=False)
        >>> int(state.step)
        20

        Of a dataset, each of several processes reads the rows of its own devices:

        >>> state = ts.fit(step, state, torch.randn(64, 4), batch_size=8, steps=30, progress=False)
        >>> int(state.step)
        30
    """
    settings = Settings(
        steps=steps,
        eval_every=eval_every,
        on_bad_step=on_bad_step,
        skip_grad_norm=skip_grad_norm,
        seed=check_seed(seed),
        prove_steps=prove_steps,
        check_replicas_every=check_replicas_every,
    )
    check_count("log_every", log_every)
    check_count("prefetch", prefetch)
    check_kind("step", step, TrainStep, hint="make_train_step gives one.")
    check_kind("state", state, TrainState | None, hint="step.init(seed=0) gives one.")
    check_kind("checkpointer", checkpointer, Checkpointer | None, hint="Give Checkpointer(directory).")
    if log is not None:
        check_directory("log", log)
    check_kind("callbacks", callbacks, list | tuple, hint="Give a list of ts.Callback.")
    for each in callbacks:
        check_kind("callbacks", each, Callback, hint="Derive it from ts.Callback.")
    check_kind("progress", progress, bool | Console)
    loader = as_rows("loader", loader, batch_size, shuffle=True)
    eval_loader = evaluation_rows(eval_loader, batch_size, loader)
    _check_evaluation(eval_loader, eval_every, eval_step, predict or compute_metrics)
    batches, evaluation = _batches("loader", loader, step, settings.seed), None
    if eval_loader is not None:
        eval_step = eval_step or step.evaluation()
        predictions = None
        if predict is not None or compute_metrics is not None:
            predictions = Predictions(step, predict, compute_metrics)
        evaluation = Evaluation(eval_step, _batches("eval_loader", eval_loader, eval_step, settings.seed), predictions)
    schedule = Schedule.of(step, scheduler, schedule_by, epoch=batches.per_epoch, evaluates=evaluation is not None)
    if is_shared(step.mesh):
        given = {"a given state": state is not None, "predictions": predict is not None}
        loaders = {"loader": loader, "eval_loader": eval_loader}
        _agree_on_run(dataclasses.asdict(settings) | given, checkpointer, loaders)
    state, notes = _begin(step, state, checkpointer)
    if evaluation is not None:
        evaluation.try_out(state)
    start = int(state.num_batches)
    _check_start(step, start, steps)
    with contextlib.ExitStack() as stack:
        tells = jax.process_index() == 0
        bar = stack.enter_context(Bar(progress if tells else False, start, steps))
        metrics_log = None
        if log is not None and tells:
            metrics_log = stack.enter_context(contextlib.closing(MetricsLog(log, start=start)))
        gate = Gate.of(step.mesh)
        stack.callback(gate.close)
        if checkpointer is not None:
            stack.enter_context(gate.signals())
        ahead = Ahead(batches.starting_at(start), step, prefetch, steps - start)
        stack.callback(ahead.close)
        reports = Reports(bar, metrics_log, log_every)
        told = Callbacks(callbacks, Run(step, steps, start, state, reports))
        told.take_up(notes.get("callbacks", {}))
        told.tell("on_begin")
        schedule.begin(start, notes, step.optimizer)
        return Loop(
            settings=settings,
            state=state,
            position=start,
            proved_until=start + prove_steps,
            step=step,
            ahead=ahead,
            evaluation=evaluation,
            checkpointer=checkpointer,
            reports=reports,
            gate=gate,
            schedule=schedule,
            told=told,
            owes_evaluation=evaluation is not None and notes.get("owes_evaluation", False),
        ).run()


def _batches(argument: str, loader: Any, step: Step, seed: int) -> Batches:
    check_samplers(argument, loader, step)
    if isinstance(loader, Rows):
        loader = TrainingRows(loader, step, seed=seed) if argument == "loader" else EvaluationRows(loader, step)
    return Batches(loader, seed=seed)


def _check_start(step: TrainStep, start: int, steps: int) -> None:
    """Refuse a state that is ahead of the run, and warn of what is probably a mistake."""
    if start > steps:
        raise ValueError(
            f"fit: the state has seen {start} batches, and steps={steps} is the number of the whole run. "
            f"For {steps} more give steps=int(state.num_batches) + {steps}."
        )
    if start == steps:
        logger.warning(
            "fit: the state has seen %d batches already, and steps=%d is the number of the whole run.", start, steps
        )
    if not step.model.training and any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in step.model.modules()):
        logger.warning("fit: the model is in eval mode, so nothing is dropped. To train it, call model.train() before.")


def _check_evaluation(eval_loader: object, eval_every: object, eval_step: object, metrics: object) -> None:
    check_kind("eval_step", eval_step, EvalStep | None, hint="make_eval_step gives one.")
    if eval_loader is not None:
        hint = "All of its batches are taken each time."
        check_kind("eval_loader", eval_loader, Rows if isinstance(eval_loader, Rows) else Iterable, hint=hint)
    elif not (eval_every is eval_step is metrics is None):
        raise ValueError(
            "fit: eval_every, eval_step, predict and compute_metrics are for an evaluation, which needs eval_loader."
        )


def _begin(
    step: TrainStep, state: TrainState | None, checkpointer: Checkpointer | None
) -> tuple[TrainState, dict[str, Any]]:
    """The given state, or the newest checkpoint if that is ahead of it, and its notes."""
    if state is not None and state.step.is_deleted():
        raise ValueError(
            "fit: this state was donated to an earlier step or fit. Go on with the state that it returned."
        )
    if checkpointer is not None:
        checkpointer.claim()
        if checkpointer.steps() and (state is None or checkpointer.steps()[-1] > int(state.step)):
            saved = checkpointer.restore(step)
            if state is None or int(saved.num_batches) >= int(state.num_batches):
                logger.info("fit: goes on from step %d in %s", int(saved.step), checkpointer.directory)
                return saved, checkpointer.notes(int(saved.step))
    return step.init(seed=0) if state is None else state, {}


_OF_LOADERS = ("batch_size", "drop_last")
"""Attributes of a loader that decide how many batches it gives."""

_ADVICE = {
    "directory of the Checkpointer": "All processes save into one directory, which all of them see.",
    "the newest checkpoint": "All processes must see one directory of checkpoints, on a disk that they share.",
}


def _agree_on_run(
    settings: Mapping[str, object], checkpointer: Checkpointer | None, loaders: Mapping[str, object]
) -> None:
    """Compare the arguments of `fit` on which the number and the order of its steps depend."""
    facts = dict(settings) | {"the presence of a checkpointer": checkpointer is not None}
    if checkpointer is not None:
        own = {"every": checkpointer.every, "keep": checkpointer.keep, "directory": checkpointer.directory}
        facts |= {f"{name} of the Checkpointer": value for name, value in own.items()}
        facts["the newest checkpoint"] = next(iter(checkpointer.steps()[::-1]), None)
    for name, loader in loaders.items():
        facts[f"the kind of {name}"] = type(loader).__name__
        facts |= {f"{each} of {name}": getattr(loader, each) for each in _OF_LOADERS if hasattr(loader, each)}
        facts[f"the length of {name}"] = reliable_len(loader)
    compare("the beginning of fit", facts, advice=lambda name: _ADVICE.get(name, "Give all processes the same."))
