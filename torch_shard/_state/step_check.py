"""Steps that are not taken: a state is kept where the loss or a gradient is not finite or too large."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding

from torch_shard._common.caller import caller
from torch_shard._common.host_memory import is_on_host
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._sharding import Stacks
from torch_shard._state.state import KINDS, TrainState


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


# What a step is given as a state: one that is whole, of the same model, not used up, and not of a trace.


def check_state(state: TrainState, *, only_shapes: bool = False) -> None:
    """Refuse what is not a state, one that is used up, and shapes of one, unless they are accepted."""
    hint = "step.init(seed=0) gives one, and each step the next: state, metrics = step(state, batch)."
    check_kind("state", state, TrainState, hint=hint)
    if isinstance(cast(object, state.step), jax.ShapeDtypeStruct) and not only_shapes:
        raise TypeError(
            f"{caller()}: the state has shapes and no values, which step.lower and step.preview take. {hint}"
        )
    refuse_traced("state", state)
    if isinstance(cast(object, state.step), jax.Array) and state.step.is_deleted():
        raise ValueError(
            f"{caller()}: this state was donated to an earlier call of the step. Go on with the state that "
            "the call returned: state, metrics = step(state, batch)."
        )
    if gone := _paths(state, lambda leaf: isinstance(leaf, jax.Array) and leaf.is_deleted()):
        raise ValueError(
            f"{caller()}: arrays of this state are gone, as another state that shares them was donated to a step: "
            f"{', '.join(gone)}. A step reuses all arrays of its state. {_COPY}"
        )


def refuse_traced(what: str, values: PyTree) -> None:
    """Refuse the state or the batch of a call within a function that JAX traces."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
        raise NotImplementedError(
            f"{caller()}: the {what} is traced by a jax.jit or another transform around the call. A step is a "
            "compiled program by itself: call it outside."
        )


def check_apart(who: str, state: TrainState) -> None:
    """Refuse a state that has an array twice, which a step would donate twice."""
    plain = {kind: {} for kind in KINDS if not isinstance(getattr(state, kind), Stacks)}  # to be stored anew
    leaves = jax.tree.leaves(dataclasses.replace(state, **plain))
    counts = collections.Counter(id(leaf) for leaf in leaves if isinstance(leaf, jax.Array))
    if any(count > 1 for count in counts.values()):
        shared = ", ".join(_paths(state, lambda leaf: counts[id(leaf)] > 1))
        raise ValueError(
            f"{who}: the state has one array in several places: {shared}. A step reuses each array of its state once. "
            f"{_COPY}"
        )


_COPY = "Give each its own: dataclasses.replace(state, frozen=jax.tree.map(jnp.copy, other.params))."


def _paths(state: TrainState, chosen: Callable[[object], bool]) -> list[str]:
    """The places of leaves of a state, as `params['0.weight']`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path).removeprefix(".") for path, leaf in leaves if chosen(leaf)]


def check_names(state: TrainState, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse the state of another model."""
    found = cast(dict[str, jax.ShapeDtypeStruct], jax.eval_shape(dict, state.tensors))
    missing = [name for name in own if name not in found]
    apart = [
        f"{name} {found[name].shape}, where the model has {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if missing or apart:
        has = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(apart[:8])}"
        raise ValueError(
            f"{caller()}: the state {has}, so that it is of another model. Give one that "
            "step.init or Checkpointer.restore made for this model."
        )


def refuse_misplaced(state: TrainState, shardings: TrainState, error: ValueError) -> None:
    """Refuse a state that lies as the plan of another step has it, of which JAX names no parameter."""
    leaves, own = jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings)
    apart = [
        f"{jax.tree_util.keystr(path)[1:]} {leaf.shape} is split by {leaf.sharding.spec}, here by {to.spec}"
        for (path, leaf), to in zip(leaves, own, strict=True)
        if isinstance(leaf.sharding, NamedSharding) and not leaf.sharding.is_equivalent_to(to, leaf.ndim)
    ]
    if apart:
        raise ValueError(
            f"{caller()}: the state lies as the plan or the mesh of another step has it: {'; '.join(apart[:8])}. Give "
            "one that step.init or Checkpointer.restore made for this step, or move it: "
            "jax.device_put(state, step.shardings)."
        ) from error
