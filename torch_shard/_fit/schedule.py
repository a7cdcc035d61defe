"""A learning rate scheduler of torch in the loop."""

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torch_shard._common.validate import check_kind
from torch_shard._train import TrainStep


def check_scheduler(step: TrainStep, scheduler: object) -> None:
    """Refuse what cannot be stepped after each batch.

    Raises:
        TypeError: It is not a scheduler of torch.
        ValueError: It is of another optimizer, or needs a metric.
    """
    check_kind("scheduler", scheduler, LRScheduler | None, hint="torch.optim.lr_scheduler has them.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "fit: scheduler: ReduceLROnPlateau is stepped with a metric, after an evaluation. Train in parts, "
            "fit(steps=...) and scheduler.step(metric) in turn, or write the loop yourself."
        )
    if isinstance(scheduler, LRScheduler) and scheduler.optimizer is not step.optimizer:
        raise ValueError(
            "fit: scheduler changes the numbers of another optimizer than the one that the step was made with. Give "
            "make_train_step the optimizer itself; with an optax transformation, give that an optax schedule."
        )


def follow_schedule(scheduler: LRScheduler | None, position: int) -> None:
    """Step a scheduler up to a number of batches seen."""
    while scheduler is not None and scheduler.last_epoch < position:
        scheduler.optimizer._opt_called = True  # pyright: ignore  (else it warns that it is stepped first)
        scheduler.step()
