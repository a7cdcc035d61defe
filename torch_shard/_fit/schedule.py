"""A learning rate scheduler of torch in the loop."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torch_shard._common.validate import check_kind
from torch_shard._train import TrainStep


@dataclasses.dataclass
class Schedule:
    """A scheduler, and when it is stepped.

    Attributes:
        scheduler: Of torch; None for none.
        by: `"step"`, `"epoch"`, or the metric of an evaluation that it is stepped with.
        epoch: Number of batches of an epoch, where it is stepped by epoch.
    """

    scheduler: LRScheduler | None
    by: str
    epoch: int = 1

    @classmethod
    def of(cls, step: TrainStep, scheduler: Any, by: str | None, *, epoch: int | None, evaluates: bool) -> "Schedule":
        """Check what `fit` was given.

        Raises:
            TypeError: It is not a scheduler of torch.
            ValueError: It is of another optimizer, or cannot be stepped so.
        """
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

    def follow(self, position: int) -> None:
        """Step a scheduler, that goes by batches or epochs, up to a number of batches seen."""
        scheduler = self.scheduler
        if scheduler is None or self.by not in ("step", "epoch"):
            return
        while scheduler.last_epoch < position // (self.epoch if self.by == "epoch" else 1):
            scheduler.optimizer._opt_called = True  # pyright: ignore  (else it warns that it is stepped first)
            scheduler.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step a scheduler that goes by a metric.

        Raises:
            ValueError: The evaluation does not have it.
        """
        if self.scheduler is None or self.by in ("step", "epoch"):
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

    def state_dict(self, optimizer: object) -> dict[str, Any]:
        """What a resumed run is to know: the numbers of the groups, and what the scheduler knows, if that is plain."""
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        known = {} if self.scheduler is None or self.by in ("step", "epoch") else self.scheduler.state_dict()
        return {"groups": [_plain(group) for group in groups], "scheduler": _plain(known)}

    def load_state_dict(self, found: Mapping[str, Any], optimizer: object) -> None:
        """Go on with it, where batches alone do not say where the schedule stands."""
        if self.scheduler is not None and self.by in ("step", "epoch"):
            return
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        for group, kept in zip(groups, found.get("groups", []), strict=False):
            group.update({name: _like(group.get(name), value) for name, value in kept.items()})
        if self.scheduler is not None and found.get("scheduler"):
            self.scheduler.load_state_dict(dict(found["scheduler"]))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold of these."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        found[name] = value
    return found


def _like(present: object, value: Any) -> Any:
    """A value in the form in which a group has it."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype)
    return tuple(value) if isinstance(present, tuple) else value
