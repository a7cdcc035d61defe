"""A rule applied to arrays as they are stored: one by one, or rows of a stack at once."""

# JAX annotates some of its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._optim.rule import Entry, Flags, Rule, Scalars, Slots
from torch_shard._sharding import HostTransfers, Layout, RowUpdate, Stacks, is_on_host


@dataclasses.dataclass(frozen=True)
class StoredUpdate:
    """One step of a rule.

    Attributes:
        rule: The rule.
        flags: Of each group.
        of_groups: Coefficients of each group.
        own: Coefficients that each parameter has for itself, in the place of its group's, `(num_params,)`.
        given: For each parameter that is updated its place among these, and its group. Others stay as they are, and
            what is kept for them.
        transfers: Of slots that lie in the host's memory, if some do.
    """

    rule: Rule
    flags: Sequence[Flags]
    of_groups: Sequence[Scalars]
    own: Scalars
    given: Mapping[str, tuple[int, int]]
    transfers: HostTransfers | None = None

    def updated(self, grads: Stacks, slots: Mapping[str, Stacks], params: Stacks) -> tuple[Stacks, dict[str, Stacks]]:
        """The new parameters and slots, stored as the old ones, and where those lie."""
        found: dict[tuple[str, ...], tuple[jax.Array, Slots]] = {}
        by_row: dict[tuple[str, ...], RowUpdate] = {}
        for names in params.layout.groups:
            for part in [names] if self._is_one(names) else [(name,) for name in names]:
                if part[0] in self.given:
                    held = {slot: stored_rows(values, part) for slot, values in slots.items() if part[0] in values}
                    entry = Entry(stored_rows(grads, part), stored_rows(params, part), held)
                    update = self._of_part(part, entry, params.layout)
                    if isinstance(update, RowUpdate):
                        by_row[part] = update
                    else:
                        found[part] = update
        found |= self.transfers.by_row(by_row) if self.transfers is not None else {}
        places = {name: (part, row) for part in found for row, name in enumerate(part)}

        def stored(old: Stacks, read: Callable[[tuple[jax.Array, Slots]], jax.Array]) -> Stacks:
            def one(name: str) -> jax.Array:
                if name not in places:
                    return old.kept(name)
                part, row = places[name]
                return read(found[part]) if len(part) == 1 else read(found[part])[row]

            def group_of(names: tuple[str, ...], before: jax.Array) -> jax.Array:
                if names in found:
                    return read(found[names])
                if places.keys().isdisjoint(names):
                    return before
                return one(names[0]) if len(names) == 1 else jnp.stack(list(map(one, names)))

            return Stacks(old.layout, map(group_of, old.layout.groups, old.arrays))

        new = {slot: stored(old, lambda result, slot=slot: result[1][slot]) for slot, old in slots.items()}
        return stored(params, lambda result: result[0]), new

    def _is_one(self, names: tuple[str, ...]) -> bool:
        """Tell whether the rows of a stack are updated alike, up to numbers."""
        first, *others = [self.flags[self.given[name][1]] if name in self.given else None for name in names]
        return all(flags == first for flags in others)

    def _of_part(self, names: tuple[str, ...], entry: Entry, layout: Layout) -> tuple[jax.Array, Slots] | RowUpdate:
        """The update of a stored array, whose rows have the same flags; one by row where its slots are brought in."""
        places, groups = zip(*(self.given[name] for name in names), strict=True)
        update = functools.partial(update_tensor, self.rule, self.flags[groups[0]])
        shared = self.of_groups[groups[0]]
        if len(names) == 1:
            own = {key: jax.lax.index_in_dim(values, places[0], keepdims=False) for key, values in self.own.items()}
            return self._brought(lambda entry: update(entry, {**shared, **own}), entry)
        rows = {key: values[np.array(places)] for key, values in self.own.items()}
        if len(set(groups)) > 1:
            rows = {key: jnp.stack([self.of_groups[group][key] for group in groups]) for key in shared} | rows
        if layout.axis_of(names) is None and self._away(entry):

            def of_row(given: tuple[jax.Array, Scalars], held: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
                grad, own = given
                return update(Entry(grad, *held), {**shared, **own})

            return RowUpdate(of_row, (entry.grad, rows), (entry.param, entry.slots))
        axes = {key: 0 if key in rows else None for key in {**shared, **rows}}
        all_rows = jax.vmap(update, in_axes=(0, axes))
        return self._brought(lambda entry: all_rows(entry, {**shared, **rows}), entry)

    def _away(self, entry: Entry) -> Slots:
        """Those of the slots that lie in the host's memory."""
        return {} if self.transfers is None else {n: value for n, value in entry.slots.items() if is_on_host(value)}

    def _brought(self, update: Callable[[Entry], tuple[jax.Array, Slots]], entry: Entry) -> tuple[jax.Array, Slots]:
        """An update of an entry whose slots may lie in the host's memory."""
        if not (away := self._away(entry)):
            return update(entry)
        assert self.transfers is not None
        olds = self.transfers.bring(away)
        entry = jax.lax.optimization_barrier(entry._replace(slots={**entry.slots, **olds}))
        found, new = jax.lax.optimization_barrier(update(entry))  # as for rows
        return found, {**new, **self.transfers.send({name: new[name] for name in away}, olds)}


def update_tensor(rule: Rule, flags: Flags, entry: Entry, scalars: Scalars) -> tuple[jax.Array, Slots]:
    """A rule in float32 at least; of complex numbers, on real and imaginary parts."""
    _, param, slots = entry
    is_complex = jnp.iscomplexobj(param)
    if is_complex and not rule.by_element:
        raise ValueError("torch has no such step for complex parameters.")

    def wide(x: jax.Array) -> jax.Array:
        x = jnp.stack([x.real, x.imag], -1) if is_complex else x
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def narrow(x: jax.Array, like: jax.Array) -> jax.Array:
        return (jax.lax.complex(x[..., 0], x[..., 1]) if is_complex else x).astype(like.dtype)

    dtype = wide(param).dtype
    own = {name: value if value.dtype == bool else value.astype(dtype) for name, value in scalars.items()}
    found, new = rule.update(jax.tree.map(wide, entry), own, flags)
    return narrow(found, param), {name: narrow(value, slots[name]) for name, value in new.items()}


def stored_rows(values: Stacks, names: tuple[str, ...]) -> jax.Array:
    """What is stored for these names, as it is stored."""
    return values.kept(names[0]) if len(names) == 1 else values.kept_rows(names)


# The exponential moving average of parameters, kept beside the state of any optimizer.


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


# Gradients made smaller before the update, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do it.


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
