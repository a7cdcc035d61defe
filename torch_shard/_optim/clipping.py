"""Gradients made smaller before the update, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do it."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.caller import caller

T = TypeVar("T")


def check_clipping(max_norm: object, max_value: object) -> None:
    """Refuse limits that are not positive numbers, and two of them."""
    for name, value in (("clip_grad_norm", max_norm), ("clip_grad_value", max_value)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{caller()}: {name} must be a positive number or None, got {value!r}.")
        if not value > 0:
            raise ValueError(f"{caller()}: {name} must be a positive number or None, got {value!r}.")
    if max_norm is not None and max_value is not None:
        raise ValueError(f"{caller()}: give clip_grad_norm or clip_grad_value, not both.")


def clip_in_torch(grads: Iterable[torch.nn.Parameter], *, max_norm: float | None, max_value: float | None) -> None:
    """Let torch clip what is in `.grad`.

    Args:
        grads: Parameters with gradients.
        max_norm: As `clipped` takes it.
        max_value: As `clipped` takes it.
    """
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(grads, max_norm)
    elif max_value is not None:
        torch.nn.utils.clip_grad_value_(grads, max_value)


def clipped(grads: T, norm: jax.Array, *, max_norm: float | None, max_value: float | None) -> T:
    """Gradients within the limits."""
    if max_norm is not None:
        scale = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        return jax.tree.map(lambda grad: grad * scale.astype(grad.real.dtype), grads)
    if max_value is not None:
        return jax.tree.map(lambda grad: jnp.clip(grad, -max_value, max_value), grads)
    return grads
