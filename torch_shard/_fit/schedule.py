"""A learning rate scheduler of torch in the loop."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torch_shard._common.validate import check_kind
from torch_shard._train import TrainStep

logger = logging.getLogger(__name__)


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

    def begin(self, position: int, notes: Mapping[str, Any], optimizer: object) -> None:
        """Stand where a run goes on, or begins.

        Args:
            position: Number of batches seen.
            notes: What `state_dict` gave to the checkpoint that the run goes on with; empty if there is none.
            optimizer: Of the step.
        """
        scheduler, kept = self.scheduler, notes.get("scheduler")
        _take_numbers(optimizer, notes.get("groups", []), warns=not kept)
        if scheduler is not None and kept:
            present = scheduler.state_dict()
            scheduler.load_state_dict({**present, **_like(present, kept)})
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

    def state_dict(self, optimizer: object) -> dict[str, Any]:
        """What a resumed run is to know: the numbers of the groups, and what the scheduler knows, if that is plain."""
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        known = {} if self.scheduler is None else self.scheduler.state_dict()
        numbers = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return {"groups": list(map(_plain, numbers)), "scheduler": _plain(known)}


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


def _take_numbers(optimizer: object, kept: Sequence[Mapping[str, Any]], *, warns: bool) -> None:
    """Give the groups of an optimizer the numbers that they had, as `optimizer.load_state_dict` does."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    if kept and len(kept) != len(groups):
        raise ValueError(
            f"fit: the checkpoint was saved with {len(kept)} parameter groups, and the optimizer has {len(groups)}. "
            "Make it as the run did that saved it, or begin anew with restore(step, params_only=True)."
        )
    for number, (group, own) in enumerate(zip(groups, kept, strict=False)):
        taken = {name: _like(group.get(name), value) for name, value in own.items()}
        others = [f"{name} {group[name]!r} -> {v!r}" for name, v in taken.items() if name in group and group[name] != v]
        if warns and others:
            logger.warning(
                "fit: group %d of the optimizer takes the numbers of the checkpoint, as optimizer.load_state_dict "
                "does: %s. For those of the script, set them in a callback.",
                number,
                ", ".join(others),
            )
        group.update(taken)


def _plain(value: Any) -> Any:
    """What JSON can hold of a value; of dicts and lists, what it can hold of what is in them."""
    is_number = isinstance(value, torch.Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1
    value = value.item() if is_number else value
    if isinstance(value, Mapping):
        items = {str(name): _plain(inner) for name, inner in value.items()}
        return {name: inner for name, inner in items.items() if inner is not _NOT_PLAIN}
    if isinstance(value, list | tuple):
        found = list(map(_plain, value))
        return _NOT_PLAIN if any(inner is _NOT_PLAIN for inner in found) else found
    return value if isinstance(value, int | float | str | None) else _NOT_PLAIN


_NOT_PLAIN = object()


def _like(present: Any, value: Any) -> Any:
    """A value from JSON in the form of what is there now: tuples, tensors, and keys that are numbers."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype)
    if isinstance(value, dict) and isinstance(present, Mapping):
        keys = {str(key): key for key in present}
        numbered = bool(keys) and all(isinstance(key, int) for key in present)
        named = {keys.get(name, int(name) if numbered else name): inner for name, inner in value.items()}
        kind: Any = type(present)
        return kind({key: _like(present.get(key), inner) for key, inner in named.items()})
    if isinstance(value, list):
        held = (
            list(present) if isinstance(present, list | tuple) and len(present) == len(value) else [None] * len(value)
        )
        found = [_like(own, inner) for own, inner in zip(held, value, strict=True)]
        return tuple(found) if isinstance(present, tuple) else found
    return value
