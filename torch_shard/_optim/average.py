"""The exponential moving average of parameters, kept beside the state of any optimizer."""

# JAX says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownMemberType=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._optim.stored_update import stored_rows
from torch_shard._sharding import Stacks


class AverageState(NamedTuple):
    """What the optimizer of a step with `ema=` keeps.

    Attributes:
        inner: The state of the optimizer.
        ema: The average of each parameter that it updates, by name.
    """

    inner: Any
    ema: Any


def check_average(decay: object) -> None:
    """Refuse what is no decay."""
    if decay is not None and not (isinstance(decay, int | float) and not isinstance(decay, bool) and 0 <= decay < 1):
        raise ValueError(
            f"{caller()}: ema must be the decay of the average, at least 0 and less than 1, such as 0.999, "
            f"got {decay!r}."
        )


def averaged(ema: Stacks, params: Stacks, decay: float) -> Stacks:
    """The averages after an update, `decay * ema + (1 - decay) * parameter`, in float32 at least."""

    def moved(names: tuple[str, ...], old: jax.Array) -> jax.Array:
        new = stored_rows(params, names)
        dtype = jnp.promote_types(old.dtype, jnp.float32)
        return (decay * old.astype(dtype) + (1 - decay) * new.astype(dtype)).astype(old.dtype)

    return Stacks(ema.layout, map(moved, ema.layout.groups, ema.arrays))


def inner_state(opt_state: PyTree) -> PyTree:
    """The state of the optimizer, without averages."""
    return opt_state.inner if isinstance(opt_state, AverageState) else opt_state


def is_average(path: tuple[Any, ...]) -> bool:
    """Tell whether the path of a leaf in the state of an optimizer leads to an average."""
    return any(getattr(entry, "name", None) == "ema" for entry in path)
