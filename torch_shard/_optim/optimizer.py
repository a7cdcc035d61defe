"""What is given as an optimiser: whether it is one of optax, and whose an error is that its functions raise."""

import contextlib
from collections.abc import Generator

import torch

from torch_shard._common.caller import caller


def check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer.

    Raises:
        TypeError: It is not one of torch, and has no functions `init` and `update`.
    """
    is_optax = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if not is_optax and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{caller()}: optimizer must be an optimizer of torch.optim, such as AdamW(model.parameters()), or an "
            f"optax gradient transformation, such as optax.adamw(1e-3); got {type(optimizer).__name__}."
        )


@contextlib.contextmanager
def in_optimizer(function: str) -> Generator[None, None, None]:
    """Let an error of the optimiser's own code say so.

    Args:
        function: `init` or `update`, which is called within.
    """
    try:
        yield
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{caller()}: optimizer.{function} fails for the parameters of the model, a dict by name. Look at what the "
            f"optimizer was made with: learning rates are numbers or schedules, masks and labels have the parameters' "
            f"names. {type(error).__name__}: {error}"
        ) from error
