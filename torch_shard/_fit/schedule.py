"""A learning rate scheduler of torch in the loop."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torch_shard._common.validate import check_kind
from torch_shard._io import like, plain
from torch_shard._train import TrainStep


@dataclasses.dataclass
class Schedule:
    """A scheduler, and when it is stepped.

    Attributes:
        scheduler: Of torch; None for none.
        by: `"step"`, `"epoch"`, or the metric of an evaluation that it is stepped with.
        epoch: Number of batches of an epoch, where it is stepped by epoch.
        ahead: How many steps it has taken more than the run: in eager torch, say, before there was a run.
    """

    scheduler: LRScheduler | None
    by: str
    epoch: int = 1
    ahead: int = 0

    @classmethod
    def of(cls, step: TrainStep, scheduler: Any, by: str | None, *, epoch: int | None, evaluates: bool) -> "Schedule":
        """Check what `fit` was given."""
        check_kind("scheduler", scheduler, LRScheduler | None, hint="torch.optim.lr_scheduler has them.")
        check_kind("schedule_by", by, str | None, hint='"step", "epoch" or the name of a metric.')
        if scheduler is None:
            if by is not None:
                raise ValueError("fit: schedule_by says when a scheduler is stepped, and there is none.")
            return cls(None, "step")
        if scheduler.optimizer is not step.optimizer:
            raise ValueError(
                "fit: scheduler changes the numbers of another optimizer than the one that the step was made with. "
                "Give make_train_step the optimizer itself; with an optax transformation, give that an optax schedule."
            )
        _stands(scheduler)
        by = by or ("loss" if isinstance(scheduler, ReduceLROnPlateau) else "step")
        by_metric = by not in ("step", "epoch")
        if by_metric != isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"fit: schedule_by={by!r} does not fit a {type(scheduler).__name__}: ReduceLROnPlateau is stepped with "
                'a metric of the evaluation, such as "loss", and others by "step" or by "epoch".'
            )
        if by_metric and not evaluates:
            raise ValueError(f"fit: the scheduler is stepped with {by!r} of an evaluation, which needs eval_loader.")
        if by == "epoch" and epoch is None:
            raise ValueError(
                'fit: schedule_by="epoch" needs a loader with a length, which says where an epoch ends. Give a list, a '
                "DataLoader or a dataset, or a scheduler that is stepped by batch."
            )
        return cls(scheduler, by, epoch or 1)

    @property
    def _is_by_position(self) -> bool:
        return self.scheduler is not None and self.by in ("step", "epoch")

    def _due(self, position: int) -> int:
        """How many steps a run takes up to a number of batches seen."""
        return position // (self.epoch if self.by == "epoch" else 1)

    def begin(self, position: int, notes: Mapping[str, Any]) -> None:
        """Stand where a run goes on, or begins.

        Args:
            position: Number of batches seen.
            notes: What `state_dict` gave to the checkpoint that the run goes on with; empty if there is none.
        """
        scheduler, kept = self.scheduler, notes.get("scheduler")
        if scheduler is not None and kept:
            present = scheduler.state_dict()
            scheduler.load_state_dict({**present, **like(present, kept)})
        if self._is_by_position:
            self._step_up_to(self._due(position))
            self.ahead = _stands(scheduler) - self._due(position)

    def follow(self, position: int) -> None:
        """Step a scheduler, that goes by batches or epochs, up to a number of batches seen."""
        if self._is_by_position:
            self._step_up_to(self._due(position) + self.ahead)

    def _step_up_to(self, number: int) -> None:
        scheduler: Any = self.scheduler
        while _stands(scheduler) < number:
            scheduler.optimizer._opt_called = True  # else it warns that it is stepped first
            scheduler.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step a scheduler that goes by a metric."""
        if self.scheduler is None or self._is_by_position:
            return
        if self.by not in metrics:
            raise ValueError(
                f"fit: schedule_by={self.by!r} is no metric of the evaluation, which has {', '.join(metrics)}."
            )
        scheduler: Any = self.scheduler
        scheduler.step(metrics[self.by])

    @staticmethod
    def rates(optimizer: object) -> dict[str, float]:
        """The learning rate of each parameter group: `lr` if there is one, else `lr_0`, `lr_1`, ..."""
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        rates = [float(group["lr"]) for group in groups]
        return {"lr": rates[0]} if len(set(rates)) == 1 else {f"lr_{number}": rate for number, rate in enumerate(rates)}

    # In checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run is to know: what the scheduler knows, if that is plain."""
        return {} if self.scheduler is None else {"scheduler": plain(self.scheduler.state_dict())}


def _stands(scheduler: Any) -> int:
    """How many steps a scheduler has taken."""
    found = getattr(scheduler, "last_epoch", None)
    inner = getattr(scheduler, "_schedulers", None)  # of ChainedScheduler, all of which are stepped together
    if found is None and inner:
        return _stands(inner[0])
    if not isinstance(found, int):
        raise TypeError(
            f"fit: a {type(scheduler).__name__} has no last_epoch, which says where it stands. Call its step() in a "
            "callback (on_step) instead of giving it as scheduler=."
        )
    return found
