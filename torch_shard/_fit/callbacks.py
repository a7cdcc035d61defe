"""What a user adds to the loop: callbacks, and what each is told of the run."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count, check_kind
from torch_shard._fit.reports import Reports
from torch_shard._io import Checkpointer
from torch_shard._state import TrainState
from torch_shard._train import TrainStep

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Run:
    """A run of `fit`, as a callback sees it.

    Attributes:
        step: The train step.
        steps: Number of batches of the whole run.
        position: Number of batches seen.
        state: After the last of them. The next step takes its arrays, so do not keep it.
        metrics: Of the last batch, as the step gives them: on the devices, and perhaps still computed. To read one
            waits for it.
        reports: Where numbers go.
        reason: Why a callback has asked to stop; empty if none has.

    Example:
        >>> import torch_shard as ts
        >>> class Rates(ts.Callback):
        ...     def on_step(self, run: ts.Run) -> None:
        ...         run.log(lr=run.step.optimizer.param_groups[0]["lr"])
    """

    step: TrainStep
    steps: int
    position: int
    state: TrainState
    reports: Reports = dataclasses.field(repr=False)
    metrics: Mapping[str, PyTree] = dataclasses.field(default_factory=dict[str, PyTree], repr=False)
    reason: str = ""

    @property
    def numbers(self) -> Mapping[str, float]:
        """The latest on the host, by name: of a batch before, and of evaluations with `eval_` before the name."""
        return self.reports.numbers

    def log(self, **numbers: float) -> None:
        """Write numbers to the log, at this position.

        Args:
            **numbers: By name.
        """
        self.reports.add(self.position, numbers)

    def text(self, name: str, text: str) -> None:
        """Write a text to TensorBoard, such as a sample of the model.

        Args:
            name: Of the texts of its kind.
            text: The text.
        """
        self.reports.add_text(self.position, name, text)

    def stop(self, reason: str) -> None:
        """End the run after this batch, as at its last one: state saved, `on_end` called.

        Of several processes all must ask for it at the same batch: decide by losses and metrics, which are alike, and
        not by times.

        Args:
            reason: For the log.
        """
        self.reason = reason or "a callback has asked for it"


class Callback:
    """Base class of callbacks of `fit`: override what you need.

    Each is called in all processes, between two steps. What it raises ends the run like an error of a step: the state
    is saved first.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> class Counts(ts.Callback):
        ...     steps = 0
        ...     def on_step(self, run):
        ...         self.steps += 1
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> counts = Counts()
        >>> state = ts.fit(step, None, [torch.ones(8, 4)], steps=3, callbacks=[counts], progress=False)
        >>> counts.steps
        3
    """

    name = ""
    """Tells callbacks of one class apart, of which a run has several: a resumed one takes up its states by both."""

    def on_begin(self, run: Run) -> None:
        """Before the first step of a call of `fit`, when the state of a checkpoint was taken up.

        Args:
            run: The run.
        """

    def on_step(self, run: Run) -> None:
        """After a step, whose metrics may still be computed.

        Args:
            run: The run.
        """

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After an evaluation.

        Args:
            run: The run.
            metrics: Its means by name, `loss` among them.
        """

    def on_save(self, run: Run) -> None:
        """After a checkpoint was begun.

        Args:
            run: The run.
        """

    def on_end(self, run: Run) -> None:
        """At the end of the run, before its last checkpoint: after its last step, a signal, or a stop.

        Args:
            run: The run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run is to know: numbers, texts, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Args:
            state: From the checkpoint with which the run goes on.
        """


class _Better:
    """Whether a metric is better than its best so far."""

    def __init__(self, metric: str, mode: str, least: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'{caller()}: mode must be "min" or "max", got {mode!r}.')
        self.metric, self._sign, self._least = metric, 1 if mode == "min" else -1, least
        self.best = math.inf * self._sign

    def note(self, metrics: Mapping[str, float]) -> bool:
        if self.metric not in metrics:
            raise ValueError(
                f"fit: a callback looks at {self.metric!r}, which the evaluation does not have. There are "
                f"{', '.join(metrics)}."
            )
        value = metrics[self.metric]
        better = (self.best - value) * self._sign > self._least
        if better:
            self.best = value
        return better


class EarlyStopping(Callback):
    """End the run when evaluations have stopped getting better.

    Args:
        metric: Of the evaluation.
        patience: So many evaluations in a row without a better one end the run.
        min_delta: A change must be larger than this to be better.
        mode: `"min"` if less is better, `"max"` if more is.

    Raises:
        ValueError: An option has no such value.

    Example:
        >>> import torch_shard as ts
        >>> stopping = ts.EarlyStopping(patience=5)
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        check_count("patience", patience)
        self._better, self._patience, self._waited = _Better(metric, mode, min_delta), patience, 0
        self.name = metric

    def on_begin(self, run: Run) -> None:
        """End a run that has ended so before.

        Args:
            run: The run.
        """
        self._stop(run)

    def _stop(self, run: Run) -> None:
        if self._waited >= self._patience:
            run.stop(f"{self._better.metric} was {self._better.best:.4g} {self._waited} evaluations ago, the best")

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Count evaluations that are no better.

        Args:
            run: The run.
            metrics: The means by name.
        """
        self._waited = 0 if self._better.note(metrics) else self._waited + 1
        self._stop(run)

    def state_dict(self) -> dict[str, Any]:
        """Give the best value, and for how long."""
        return {"best": self._better.best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them.

        Args:
            state: What `state_dict` gave.
        """
        self._better.best, self._waited = float(state["best"]), int(state["waited"])


class BestCheckpoint(Callback):
    """Save the state whenever an evaluation is the best so far.

    Args:
        checkpointer: Saves it, in a directory of its own: `Checkpointer("best", keep=1)`.
        metric: Of the evaluation.
        mode: `"min"` if less is better, `"max"` if more is.

    Raises:
        ValueError: An option has no such value.

    Example:
        >>> import tempfile, torch_shard as ts
        >>> best = ts.BestCheckpoint(ts.Checkpointer(tempfile.mkdtemp(), keep=1), metric="accuracy", mode="max")
    """

    def __init__(self, checkpointer: Checkpointer, metric: str = "loss", *, mode: str = "min") -> None:
        check_kind("checkpointer", checkpointer, Checkpointer)
        self._checkpointer, self._better = checkpointer, _Better(metric, mode)
        self.name, self._goes_on = metric, False

    def on_begin(self, run: Run) -> None:
        """Refuse the directory of another run.

        Args:
            run: The run.

        Raises:
            ValueError: It has checkpoints, and this run begins.
        """
        if (steps := self._checkpointer.steps()) and not self._goes_on:
            raise ValueError(
                f"fit: BestCheckpoint: {self._checkpointer.directory} has checkpoints of another run, {steps}; "
                "one would be taken for the best of this one. Give this run a directory of its own, or remove "
                "those."
            )
        self._checkpointer.take_over()
        self._goes_on = True

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Save a better state.

        Args:
            run: The run.
            metrics: The means by name.
        """
        if self._better.note(metrics):
            self._checkpointer.save(run.state, metrics=metrics)

    def on_end(self, run: Run) -> None:
        """Wait for the last one.

        Args:
            run: The run.
        """
        self._checkpointer.wait()

    def state_dict(self) -> dict[str, Any]:
        """The best value."""
        return {"best": self._better.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it.

        Args:
            state: What `state_dict` gave.
        """
        self._better.best, self._goes_on = float(state["best"]), True


class Callbacks:
    """The callbacks of a run, called in their order."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self.run, self._all = run, dict[str, Callback]()
        for each in callbacks:
            key = f"{type(each).__qualname__} {each.name}".strip()
            number = sum(other.partition(" #")[0] == key for other in self._all)
            self._all[f"{key} #{number + 1}" if number else key] = each

    def at(self, position: int, state: TrainState, metrics: Mapping[str, PyTree] | None = None) -> None:
        """Tell where the run stands."""
        self.run.position, self.run.state = position, state
        self.run.metrics = self.run.metrics if metrics is None else metrics

    def tell(self, what: str, *args: object) -> None:
        """Call a method of each."""
        state = self.run.state
        for name, each in self._all.items():
            getattr(each, what)(self.run, *args)
            if self.run.state is not state:
                raise ValueError(
                    f"fit: {what} of the callback {name} has set run.state, which the run would not follow. Stop it "
                    "(run.stop), and call fit again with the other state."
                )

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What a resumed run is to know, by class and name."""
        return {key: each.state_dict() for key, each in self._all.items()}

    def take_up(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take it up, each its own."""
        for key, each in self._all.items():
            if state := states.get(key):
                each.load_state_dict(state)
        if new := [key for key, each in self._all.items() if states and key not in states and each.state_dict()]:
            logger.warning("fit: the checkpoint has nothing of the callbacks %s: they begin anew.", ", ".join(new))
        if gone := [key for key, state in states.items() if key not in self._all and state]:
            logger.warning("fit: the checkpoint has states of callbacks that are not given: %s.", ", ".join(gone))
