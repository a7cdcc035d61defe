"""Steps that are not taken: a state is kept where the loss or a gradient is no good."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from torch_shard._stacks import Stacks
from torch_shard._state import TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a guarded step found.

    Attributes:
        skipped: Whether the state was kept, bool scalar.
        finite: For each stored array of the trainable parameters whether its gradient is finite: bool (), or (n,) for
            the rows of a stack.
    """

    skipped: Any
    finite: Stacks

    def non_finite(self) -> list[str]:
        """Names of the parameters whose gradient is not finite, in the module's order."""
        return [name for name in self.finite if not bool(self.finite[name])]


def judge(loss: jax.Array, grads: Stacks, norm: jax.Array, max_grad_norm: float) -> Verdict:
    """Look at a step before it is taken.

    Args:
        loss: Scalar.
        grads: Of the trainable parameters.
        norm: Their global L2 norm.
        max_grad_norm: The largest that will do; with infinity only what is not finite is refused.
    """
    sizes = map(len, grads.layout.groups)
    finite = Stacks(grads.layout, map(_is_finite, grads.arrays, sizes))
    good = jnp.stack([jnp.isfinite(loss), norm <= max_grad_norm, *(rows.all() for rows in finite.arrays)]).all()
    return Verdict(~good, finite)


def _is_finite(array: jax.Array, num_rows: int) -> jax.Array:
    rows = range(1 if num_rows > 1 else 0, array.ndim)
    return jnp.isfinite(array).all(tuple(rows))


def keep(skipped: jax.Array, old: TrainState, new: TrainState) -> TrainState:
    """`old` where the step is skipped, else `new`; the batch counts as seen either way."""
    kept = jax.tree.map(lambda a, b: jnp.where(skipped, a, b), old, dataclasses.replace(new, key=old.key))
    return dataclasses.replace(kept, num_batches=new.num_batches)


def check_max_grad_norm(caller: str, value: Any) -> None:
    """Refuse what is no norm.

    Raises:
        ValueError: It is not a positive number.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):
        raise ValueError(
            f"{caller}: max_grad_norm must be a positive number, math.inf to skip only what is not finite, or None, "
            f"got {value!r}."
        )
