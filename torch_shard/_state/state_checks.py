"""What a step is given as a state: one that is whole, of the same model, not used up, and not of a trace."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import cast

import jax
from jax.core import Tracer

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._sharding import Stacks
from torch_shard._state.state import KINDS, TrainState


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


def check_names(state: TrainState, names: Iterable[str]) -> None:
    """Refuse the state of another model."""
    found = state.tensors
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"{caller()}: the state lacks {', '.join(missing)}, so that it is of another model. Give one that "
            "step.init or Checkpointer.restore made for this model."
        )
