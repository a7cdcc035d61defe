"""The exponential moving average of parameters, kept beside the state of any optimizer."""

# optax has no stubs. JAX says nothing of what `jax.tree.map` gives to a function.
# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._optim.rule import Entry, Flags, Rule, Scalars, Slots

SLOT = "ema"
"""Where it stands among the slots of an optimizer of torch."""


class AverageState(NamedTuple):
    """What `with_average` keeps.

    Attributes:
        inner: The state of the optimizer.
        ema: The average of each parameter, by name.
    """

    inner: Any
    ema: PyTree


def check_average(decay: object) -> None:
    """Refuse what is no decay."""
    if decay is not None and not (isinstance(decay, int | float) and not isinstance(decay, bool) and 0 <= decay < 1):
        raise ValueError(
            f"{caller()}: ema must be the decay of the average, at least 0 and less than 1, such as 0.999, "
            f"got {decay!r}."
        )


def with_average(optimizer: Any, decay: float) -> optax.GradientTransformationExtraArgs:
    """The same optimizer, which also keeps `ema = decay * ema + (1 - decay) * parameter`, from the first values on."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> AverageState:
        return AverageState(inner.init(params), jax.tree.map(jnp.copy, params))

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, AverageState]:
        updates, own = inner.update(grads, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        return updates, AverageState(own, jax.tree.map(lambda ema, p: _average(ema, p, decay), state.ema, new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def rule_with_average(rule: Rule, decay: float) -> Rule:
    """The same for an optimizer of torch."""

    def slots(tensor: jax.Array, flags: Flags) -> Slots:
        return {**rule.slots(tensor, flags), SLOT: jnp.copy(tensor)}  # an array of its own, as a step donates each once

    def update(entry: Entry, scalars: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
        own = {name: value for name, value in entry.slots.items() if name != SLOT}
        param, new = rule.update(entry._replace(slots=own), scalars, flags)
        return param, {**new, SLOT: _average(entry.slots[SLOT], param, decay)}

    return dataclasses.replace(rule, slots=slots, update=update)


def average_of(opt_state: PyTree) -> Mapping[str, jax.Array]:
    """The averages by name, in the state of an optimizer that keeps them."""
    return opt_state.ema if isinstance(opt_state, AverageState) else opt_state.slots[SLOT]


def has_average(opt_state: PyTree) -> bool:
    """Tell whether the state of an optimizer has averages that `average_of` gives."""
    return isinstance(opt_state, AverageState) or SLOT in getattr(opt_state, "slots", ())


def is_average(path: tuple[Any, ...]) -> bool:
    """Tell whether the path of a leaf in the state of an optimizer leads to an average."""
    return any(SLOT in (getattr(entry, "key", None), getattr(entry, "name", None)) for entry in path[:-1])


def average_unchanged(
    before: PyTree, after: PyTree, params: Mapping[str, jax.Array], names: Sequence[str], decay: float
) -> PyTree:
    """The state after an update, where these parameters stay as they were whatever the optimizer made of them."""
    held = {n: _average(average_of(before)[n], params[n], decay) for n in names if n in average_of(before)}
    if isinstance(after, AverageState):
        return after._replace(ema={**after.ema, **held})
    return dataclasses.replace(after, slots={**after.slots, SLOT: after.slots[SLOT].updated(held)})


def _average(ema: jax.Array, param: jax.Array, decay: float) -> jax.Array:
    return (decay * ema + (1 - decay) * param).astype(ema.dtype)
