"""What a step is given as a state: one that is whole, of the same model, not used up, and not of a trace."""

from collections.abc import Iterable
from typing import cast

import jax
from jax.core import Tracer

from torch_shard._common.validate import check_kind
from torch_shard._train.state import TrainState


def check_state(who: str, state: TrainState, *, only_shapes: bool = False) -> None:
    """Refuse what is no state, one that is used up, and, unless they will do, shapes of one.

    Raises:
        TypeError: It is something else.
        ValueError: It was donated.
        NotImplementedError: A program of the user's is being compiled.
    """
    hint = "step.init(seed=0) gives one, and each step the next: state, metrics = step(state, batch)."
    check_kind("state", state, TrainState, hint=hint)
    if isinstance(cast(object, state.step), jax.ShapeDtypeStruct) and not only_shapes:
        raise TypeError(f"{who}: the state has shapes and no values, which step.lower and step.preview take. {hint}")
    if isinstance(state.step, Tracer):
        raise NotImplementedError(
            f"{who}: the state is traced by a jax.jit or another transform around the call. A step is a "
            "compiled program by itself: call it outside."
        )
    if isinstance(cast(object, state.step), jax.Array) and state.step.is_deleted():
        raise ValueError(
            f"{who}: this state was donated to an earlier call of the step. Go on with the state that "
            "the call returned: state, metrics = step(state, batch)."
        )


def check_names(who: str, state: TrainState, names: Iterable[str]) -> None:
    """Refuse the state of another model.

    Raises:
        ValueError: It lacks entries; all are listed.
    """
    found = state.tensors
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"{who}: the state lacks {', '.join(missing)}, so that it is of another model. Give one that "
            "step.init or Checkpointer.restore made for this model."
        )
