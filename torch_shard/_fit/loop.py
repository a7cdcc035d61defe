"""One call of `fit`, from batch to batch: steps, what is due between them, and an orderly end."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count, is_integer
from torch_shard._fit.callbacks import Callbacks
from torch_shard._fit.data import Ahead, Batches
from torch_shard._fit.reports import Predictions, Reports, scalars
from torch_shard._fit.schedule import Schedule
from torch_shard._hosts import Gate, PeerError
from torch_shard._inspect import find_nan, replay, save_bad_batch
from torch_shard._io import Checkpointer
from torch_shard._spmd import assert_replica_integrity
from torch_shard._state import TrainState, check_skip_grad_norm, present_state
from torch_shard._train import EvalStep, ShardedBatch, TrainStep

logger = logging.getLogger(__name__)

ON_BAD_STEP = ("raise", "explain", "stop", "skip")


class BadStepError(ArithmeticError):
    """A step was not taken: its loss or gradient is not finite, or its gradient is larger than allowed.

    `fit` raises it where `on_bad_step="raise"`.

    Args:
        message: Which batch, which loss, and which parameters.
        state: The state as it was before the step.
        non_finite: Names of the parameters with a gradient that is not finite, in the module's order.

    Attributes:
        state: The state as it was before the step; the run can go on from it.
        non_finite: Names of the parameters with a gradient that is not finite, in the module's order.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> try:
        ...     ts.fit(step, None, [torch.full((8, 4), torch.inf)], steps=1, progress=False)
        ... except ts.BadStepError as error:
        ...     int(error.state.step), error.non_finite
        (0, ['weight', 'bias'])
    """

    def __init__(self, message: str, state: TrainState, non_finite: list[str]) -> None:
        super().__init__(message)
        self.state, self.non_finite = state, non_finite


def why_bad(metrics: dict[str, PyTree], skip_grad_norm: float) -> tuple[list[str], str]:
    """Parameters with a gradient that is not finite, and why a step was not taken, in words."""
    loss, norm, names = float(metrics["loss"]), float(metrics["grad_norm"]), metrics["guard"].non_finite()
    if names:
        total = len(metrics["guard"].finite)
        return names, f"the loss is {loss}, and {len(names)} of {total} gradients are not finite ({_some(names)})"
    if lost := metrics["guard"].nonfinite_buffers():
        return names, f"the loss is {loss}, and the batch would have made {_some(lost)} not finite"
    return names, f"the loss is {loss}, the gradient's norm {norm:.4g} (skip_grad_norm={skip_grad_norm})"


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:2])}, ..., {', '.join(names[-2:])}"


_MOST_WORK = 1e12
"""Parameters times numbers of a batch: more would take eager torch on a CPU minutes."""

_UNKNOWN = "Where it began is not known"


def first_non_finite(step: TrainStep, placed: ShardedBatch, state: TrainState) -> str:
    """Say where the first value that is not finite came from, or that it is not known; one sentence."""
    work = sum(p.numel() for p in step.model.parameters()) * sum(math.prod(array.shape) for array in placed.arrays)
    if jax.process_count() > 1 or work > _MOST_WORK:
        return f"{_UNKNOWN}: repeating the batch in eager torch would take long"
    try:
        found = replay(step, state, placed)
    except Exception as error:
        logger.info("fit: the batch of a bad step cannot be repeated in eager torch.", exc_info=True)
        return f"{_UNKNOWN}: eager torch ends this batch with {type(error).__name__}: {error}".rstrip(".")
    if not found:
        return f"{_UNKNOWN}: in eager torch on the CPU all values of this batch are finite"
    return ". ".join([found.sentence, *(note.rstrip(".") for note in found.notes)])


def explained(step: TrainStep, placed: ShardedBatch, state: TrainState, directory: Path | None) -> str:
    """Say all that `find_nan` does, and keep the batch."""
    kept = ""
    if directory is not None:
        path = save_bad_batch(step, placed, directory)
        kept = f"\n\nThe batch is in {path}: torch-shard replay FILE.py {directory} says this again"
    return f"\n\n{find_nan(step, state, placed)}{kept}"


class Evaluation:
    """The mean of loss and metrics over all batches of a loader, and what is computed of all predictions."""

    def __init__(self, step: EvalStep, batches: Batches, predictions: Predictions | None = None) -> None:
        self._step, self._batches, self._predictions = step, batches, predictions

    def try_out(self, state: TrainState) -> None:
        """Meet mistakes of `predict` before any training, by its capture for the first batch."""
        if self._predictions and (batch := self._batches.first()) is not None:
            self._predictions.step.lower(state, batch)

    def __call__(self, state: TrainState) -> dict[str, float]:
        """The means by name, in which a batch weighs as many rows as it has; each draws random numbers of its own."""
        state = present_state(state)  # another state made of it is no model's
        found: list[dict[str, Any]] = []
        weights: list[int] = []
        if self._predictions:
            self._predictions.begin()
        for number, batch in enumerate(self._batches.epoch(0)):
            placed = self._step.put(batch)
            if number and self._step.draws_random:
                state = dataclasses.replace(state, key=jax.random.fold_in(state.key, number))
            found.append(jax.device_get(scalars(self._step(state, placed))))
            weights.append(placed.num_rows)
            if self._predictions:
                self._predictions.add(state, placed)
            if found[-1].keys() != found[0].keys():
                raise ValueError(
                    f"fit: loss_fn gives the metrics {', '.join(found[0])} of the first batch of the evaluation, and "
                    f"{', '.join(found[-1])} of batch {number}: a mean over all needs each of all. Return the same "
                    "names for every batch, or take what is of some alone from predict= and compute_metrics=."
                )
        if not found:
            raise ValueError("fit: eval_loader has no batches. (An iterator is used up after one evaluation.)")
        means = {name: float(np.average([float(each[name]) for each in found], weights=weights)) for name in found[0]}
        computed = self._predictions.metrics() if self._predictions else {}
        if twice := sorted(means.keys() & computed.keys()):
            raise ValueError(
                f"fit: compute_metrics and loss_fn both give {', '.join(twice)}. Give one of them another name."
            )
        return means | computed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does, and when, as `fit` takes it: alike in all processes."""

    steps: int
    eval_every: int | None
    on_bad_step: str
    skip_grad_norm: float | None
    seed: int
    prove_steps: int
    check_replicas_every: int | None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        for name in ("eval_every", "check_replicas_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not is_integer(self.prove_steps) or self.prove_steps < 0:
            raise ValueError(f"fit: prove_steps must be an integer, 0 or more, got {self.prove_steps!r}.")
        if self.on_bad_step not in ON_BAD_STEP:
            listed = ", ".join(map(repr, ON_BAD_STEP))
            raise ValueError(f"fit: on_bad_step must be one of {listed}, got {self.on_bad_step!r}.")
        check_skip_grad_norm(self.skip_grad_norm)


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One call of `fit`, from batch to batch."""

    settings: Settings
    state: TrainState
    position: int
    """Number of batches seen."""
    proved_until: int
    step: TrainStep
    ahead: Ahead
    evaluation: Evaluation | None
    checkpointer: Checkpointer | None
    reports: Reports
    gate: Gate
    schedule: Schedule
    told: Callbacks
    begun: ShardedBatch | None = None
    """The batch of a step that was begun, until the step is dispatched."""
    stopped: bool = False
    """Whether a bad step or a callback has ended the run."""
    ended: bool = False
    """Whether callbacks were told of the end."""
    owes_evaluation: bool = False
    """Whether an evaluation is due that has not been made: what is saved then makes it when it is taken up again."""
    sound: bool = True
    """Whether devices hold what they should, as far as is known."""

    def run(self) -> TrainState:
        """Train to the end, or until something asks to stop."""
        failed = None
        self._heed()
        try:
            if self.owes_evaluation:
                self._evaluate()
            while self.position < self.settings.steps and not self.stopped and self.gate.may_run(self.position):
                self._advance(next(self.ahead))
                # All processes stop before a batch that is missing in one, which goes on with them until then.
                found = self.ahead.failed() if failed is None else None
                failed = failed or found
                if found is not None and self.gate.behind(self.position, found) is None:
                    raise found
            if failed is not None:
                raise failed
        except Exception as error:
            self._rescue(error)
            raise
        self._end()
        if self.position < self.settings.steps and not self.stopped:
            self._note_stop()
            self.gate.leave(self.position)
        return self.state

    def _note_stop(self) -> None:
        """Say what is saved, and that the process leaves, where a signal has asked for that.

        At level WARNING: Python shows that on stderr where nobody has set logging up. A job that was taken away leaves
        nothing else to read.
        """
        signalled = self.gate.signalled
        if signalled is None:
            return
        saved = "nothing is saved, without a checkpointer"
        if self.checkpointer is not None:
            saved = f"step {int(self.state.step)} is saved in {self.checkpointer.directory}, from which fit goes on"
        logger.warning(
            "fit: %s after %d of %d batches: %s. This process leaves.",
            signalled,
            self.position,
            self.settings.steps,
            saved,
        )

    def _advance(self, placed: ShardedBatch) -> None:
        """Take a step, and do what is due after it."""
        self.begun = placed
        if self.position < self.proved_until:
            self._prove(placed)
        num_compiles, start = self.step.num_compiles, time.perf_counter()
        rates = self.schedule.rates(self.step.optimizer)
        self.state, metrics = self.step(self.state, placed, skip_grad_norm=self.settings.skip_grad_norm)
        self.begun, self.position = None, self.position + 1
        end, compiled = time.perf_counter(), self.step.num_compiles > num_compiles
        if compiled:
            self.reports.leave_out(start, end)
        self.reports.flush()  # of the batch before, while this one is computed
        self.reports.expect(self.position, placed, metrics, rates)
        if compiled:
            self._note_compilation(placed, end - start)
        self.ahead.fill()
        if (stopped := self._at_bad_step(placed, metrics)) is not None:
            self.state, self.stopped = stopped, True
        else:
            every, is_last = self.settings.eval_every, self.position == self.settings.steps
            self.owes_evaluation = bool(self.evaluation and (is_last or (every and self.position % every == 0)))
            self.schedule.follow(self.position)
            self.told.at(self.position, self.state, metrics)
            self.told.tell("on_step")
            self._between()
            self._heed()

    def _at_bad_step(self, placed: ShardedBatch, metrics: dict[str, Any]) -> TrainState | None:
        """Wait for the step, and look whether it was taken.

        Returns:
            The state with which the run is to stop: it has not seen the batch, which a resumed run meets again. None if
            the run goes on.
        """
        do, skip_grad_norm = self.settings.on_bad_step, self.settings.skip_grad_norm
        if skip_grad_norm is None or not bool(metrics["guard"].skipped):
            return None
        names, reason = why_bad(metrics, skip_grad_norm)
        message = f"fit: batch {self.position} was not taken, the state is as before it: {reason}."
        unseen = dataclasses.replace(self.state, num_batches=self.state.num_batches - 1)
        if do != "skip" and (names or not math.isfinite(float(metrics["loss"]))):
            directory = self.reports.directory if self.checkpointer is None else self.checkpointer.directory
            say = functools.partial(explained, directory=directory) if do == "explain" else first_non_finite
            message += f" {say(self.step, placed, unseen)}."
        if do in ("raise", "explain"):
            raise BadStepError(f'{message} on_bad_step="skip" goes on without it.', unseen, names)
        logger.warning("%s The run %s.", message, "stops" if do == "stop" else "goes on")
        return unseen if do == "stop" else None

    def _note_compilation(self, placed: ShardedBatch, seconds: float) -> None:
        if self.reports.directory is None:
            return
        leaves = zip(placed.signature.paths, placed.arrays, strict=False)
        shapes = [f"{path} {tuple(array.shape)}" for path, array in leaves]
        loops = [f"{', '.join(loop.layers)}: {loop.num_iterations}" for loop in self.step.programs[-1].loops]
        found = {"seconds": round(seconds, 3), "batch_shapes": shapes, "loops": loops}
        self.reports.write("compile", self.position, found)
        self.reports.add_text(self.position, "step", f"{self.step!r}\n\n{self.step.report()}")

    def _prove(self, placed: ShardedBatch) -> None:
        """Compare the step that is to come with eager torch, before anything of the state is lost."""
        found = self.step.prove(self.state, placed, skip_grad_norm=self.settings.skip_grad_norm)
        found.raise_if_different()
        worst = found.rows[0]
        logger.info(
            "fit: step %d is that of %s: the largest difference is %.1e (%s %s).",
            *(self.position + 1, found.reference, worst.worst, worst.kind, worst.name),
        )

    def _between(self) -> None:
        """Do what is due after this batch."""
        state, position = self.state, self.position
        if (every := self.settings.check_replicas_every) and position % every == 0:
            self.sound = False
            self.reports.flush()
            with self.reports.paused():
                assert_replica_integrity(state)
            self.sound = True
        if self.owes_evaluation:
            self._evaluate()
        if self.checkpointer is not None and position % self.checkpointer.every == 0:
            self.reports.flush(every=True)
            with self.reports.paused():
                self.checkpointer.save(state, metrics=self.reports.numbers, notes=self._notes())
                self.told.tell("on_save")

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        self.reports.flush()
        with self.reports.paused():
            found = self.evaluation(self.state)
        self.reports.add_evaluation(self.position, found)
        self.schedule.evaluated(found)
        self.owes_evaluation = False
        self.told.tell("on_eval", found)

    def _heed(self) -> None:
        """Stop where a callback has asked for it."""
        if self.told.run.reason:
            logger.info("fit: stops after %d batches: %s.", self.position, self.told.run.reason)
            self.stopped = True

    def _notes(self) -> dict[str, Any]:
        """What a resumed run is to know beside the state."""
        owed = {"owes_evaluation": True} if self.owes_evaluation else {}
        return {"callbacks": self.told.state_dict(), **self.schedule.state_dict(self.step.optimizer), **owed}

    def _end(self) -> None:
        self.reports.flush(every=True)
        if not self.ended:
            self.ended = True
            self.told.at(self.position, self.state)
            self.told.tell("on_end")
        if self.checkpointer is not None:
            self.checkpointer.save(self.state, metrics=self.reports.numbers, notes=self._notes())
            self.checkpointer.wait()

    def _rescue(self, error: Exception) -> None:
        """Save what there is, where all processes can come to it, and say with the error where it happened."""
        error.add_note(f"fit: after {self.position} of {self.settings.steps} batches.")
        if isinstance(error, BadStepError):
            self.state = error.state
        if not self.sound:  # all have found that
            return self._name_newest(error)
        behind = None if isinstance(error, PeerError) else self.gate.behind(self.position, error)
        ready = self.ahead.num_ready + (self.begun is not None)
        if behind is None or behind > ready or self.state.step.is_deleted():
            self.gate.fail(error)
            return self._name_newest(error)
        try:
            try:
                self.reports.flush(every=True)
            except Exception:  # which may be what has failed: a disk that is full still has room elsewhere
                self.reports.close()
            for _ in range(behind):  # the others had gone further when they heard of it
                self._advance(self.begun or next(self.ahead))
            self._end()
        except Exception as second:
            self.gate.fail(error)
            error.add_note(f"fit: the state could not be saved either: {second}")
        else:
            if self.checkpointer is not None:
                error.add_note(f"fit: the state is saved in {self.checkpointer.directory}.")

    def _name_newest(self, error: Exception) -> None:
        """Say where the run can be taken up again."""
        if self.checkpointer is not None:
            steps = self.checkpointer.steps()
            newest = f"the newest checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint yet"
            error.add_note(f"fit: the state is not saved; {newest}.")
