"""Steps that are not taken: a state is kept where the loss or a gradient is not finite or too large."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._sharding import Stacks, is_on_host
from torch_shard._state.state import TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCheck:
    """Findings of a guarded step.

    Attributes:
        skipped: True where the state was kept, bool scalar.
        finite: For each stored array of the trainable parameters whether its gradient is finite: bool (), or (n,) for
            the rows of a stack.
        buffers: For each stored array of the buffers whether it stays finite where it was, as for `finite`.
    """

    skipped: jax.Array
    finite: Stacks
    buffers: Stacks

    def non_finite(self) -> list[str]:
        """Names of the parameters whose gradient is not finite, in the module's order."""
        return [name for name in self.finite if not bool(self.finite[name])]

    def nonfinite_buffers(self) -> list[str]:
        """Names of the buffers that the batch would have made not finite, such as a running variance."""
        return [name for name in self.buffers if not bool(self.buffers[name])]


def global_norm(grads: PyTree) -> jax.Array:
    """The L2 norm over all gradients; of half precision in float32, which neither overflows nor loses small terms."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))


def check_step(
    loss: jax.Array, grads: Stacks, norm: jax.Array, *, skip_grad_norm: float, buffers: tuple[Stacks, ...]
) -> StepCheck:
    """Look at a step before it is taken."""
    before, after = buffers
    finite, kept = _by_row(grads), _by_row(after, before)
    rows = [rows.all() for rows in (*finite.arrays, *kept.arrays)]
    good = jnp.stack([jnp.isfinite(loss), jnp.isfinite(norm), norm <= skip_grad_norm, *rows]).all()
    return StepCheck(~good, finite, kept)


def _by_row(stacks: Stacks, before: Stacks | None = None) -> Stacks:
    """Tell whether each entry is finite, but for what was not so before."""
    olds = [None] * len(stacks.arrays) if before is None else before.arrays
    groups = zip(stacks.layout.groups, stacks.arrays, olds, strict=True)
    return Stacks(stacks.layout.plain, [_is_finite(new, old, len(group)) for group, new, old in groups])


def _is_finite(array: jax.Array, before: jax.Array | None, num_rows: int) -> jax.Array:
    finite = jnp.isfinite(array) if before is None else jnp.isfinite(array) | ~jnp.isfinite(before)
    return finite.all(tuple(range(1 if num_rows > 1 else 0, array.ndim)))


def select_state(skipped: jax.Array, old: TrainState, new: TrainState) -> TrainState:
    """`old` where the step is skipped, else `new`; the batch counts as seen either way.

    What lies in the host's memory was chosen before it went there.
    """

    def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
        return b if is_on_host(b) else jnp.where(skipped, a, b)

    kept = jax.tree.map(chosen, old, dataclasses.replace(new, key=old.key))
    return dataclasses.replace(kept, num_batches=new.num_batches)


def check_skip_grad_norm(value: object) -> None:
    """Refuse what is not a norm."""
    is_positive = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if value is not None and not is_positive:
        raise ValueError(
            f"{caller()}: skip_grad_norm must be a positive number, math.inf to skip only what is not finite, or None, "
            f"got {value!r}."
        )
