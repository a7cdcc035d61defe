"""A rule applied to arrays as they are stored: one by one, or rows of a stack at once."""

# JAX annotates some of its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.caller import caller
from torch_shard._common.host_memory import is_on_host
from torch_shard._common.types import PyTree
from torch_shard._optim.rule import Entry, Flags, Rule, Scalars, Slots
from torch_shard._optim.transfers import HostTransfers, RowUpdate
from torch_shard._sharding import Layout, Stacks


@dataclasses.dataclass(frozen=True)
class StoredUpdate:
    """One step of a rule.

    Attributes:
        rule: The rule.
        flags: Of each group.
        of_groups: Coefficients of each group.
        of_params: Coefficients that each parameter has for itself, in the place of its group's, `(num_params,)`.
        places: For each parameter that is updated its place among these, and its group. Others stay as they are, and
            what is kept for them.
        transfers: Of slots that lie in the host's memory, if some do.
    """

    rule: Rule
    flags: Sequence[Flags]
    of_groups: Sequence[Scalars]
    of_params: Scalars
    places: Mapping[str, tuple[int, int]]
    transfers: HostTransfers | None = None

    def updated(self, grads: Stacks, slots: Mapping[str, Stacks], params: Stacks) -> tuple[Stacks, dict[str, Stacks]]:
        """The new parameters and slots, stored as the old ones, and where those lie."""
        results: dict[tuple[str, ...], tuple[jax.Array, Slots]] = {}
        by_row: dict[tuple[str, ...], RowUpdate] = {}
        for part in self._parts(params.layout):
            part_slots: Slots = {}
            for slot, values in slots.items():
                if part[0] in values:
                    part_slots[slot] = stored_rows(values, part)

            entry = Entry(stored_rows(grads, part), stored_rows(params, part), part_slots)
            update = self._of_part(part, entry, params.layout)
            if isinstance(update, RowUpdate):
                by_row[part] = update
            else:
                results[part] = update

        if self.transfers is not None:
            results |= self.transfers.by_row(by_row)

        def new_params(result: tuple[jax.Array, Slots]) -> jax.Array:
            return result[0]

        def new_slot(slot: str, result: tuple[jax.Array, Slots]) -> jax.Array:
            return result[1][slot]

        new_slots: dict[str, Stacks] = {}
        for slot, old in slots.items():
            new_slots[slot] = _placed(results, old, functools.partial(new_slot, slot))
        return _placed(results, params, new_params), new_slots

    def _parts(self, layout: Layout) -> Iterator[tuple[str, ...]]:
        """The names that are updated, together where one update serves all rows of a stack."""
        for names in layout.groups:
            parts = [names] if self._is_one(names) else [(name,) for name in names]
            for part in parts:
                if part[0] in self.places:
                    yield part

    def _is_one(self, names: tuple[str, ...]) -> bool:
        """Tell whether the rows of a stack are updated alike, up to numbers."""
        flags: list[Flags | None] = []
        for name in names:
            # A loss may reach some layers alone: those rows are updated, and the others are left.
            flags.append(self.flags[self.places[name][1]] if name in self.places else None)
        return all(of_row == flags[0] for of_row in flags)

    def _of_part(self, names: tuple[str, ...], entry: Entry, layout: Layout) -> tuple[jax.Array, Slots] | RowUpdate:
        """The update of a stored array, whose rows have the same flags; one by row where its slots are brought in."""
        places = [self.places[name][0] for name in names]
        groups = [self.places[name][1] for name in names]
        update = functools.partial(update_tensor, self.rule, self.flags[groups[0]])
        shared = self.of_groups[groups[0]]

        if len(names) == 1:
            scalars = dict(shared)
            for key, values in self.of_params.items():
                scalars[key] = jax.lax.index_in_dim(values, places[0], keepdims=False)
            return self._brought(lambda entry: update(entry, scalars), entry)

        # Layers of one stack may be in different groups, as those of a layer-wise decay of lr are.
        row_scalars: dict[str, jax.Array] = {}
        if len(set(groups)) > 1:
            for key in shared:
                row_scalars[key] = jnp.stack([self.of_groups[group][key] for group in groups])
        for key, values in self.of_params.items():
            row_scalars[key] = values[np.array(places)]

        if layout.axis_of(names) is None and self._on_host(entry):

            def update_row(given: tuple[jax.Array, Scalars], old: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
                grad, scalars = given
                return update(Entry(grad, *old), {**shared, **scalars})

            return RowUpdate(update_row, (entry.grad, row_scalars), (entry.param, entry.slots))

        scalars = {**shared, **row_scalars}
        axes = {key: 0 if key in row_scalars else None for key in scalars}
        update_rows = jax.vmap(update, in_axes=(0, axes))
        return self._brought(lambda entry: update_rows(entry, scalars), entry)

    def _on_host(self, entry: Entry) -> Slots:
        """Those of the slots that lie in the host's memory."""
        if self.transfers is None:
            return {}
        return {slot: value for slot, value in entry.slots.items() if is_on_host(value)}

    def _brought(self, update: Callable[[Entry], tuple[jax.Array, Slots]], entry: Entry) -> tuple[jax.Array, Slots]:
        """An update of an entry whose slots may lie in the host's memory."""
        on_host = self._on_host(entry)
        if not on_host:
            return update(entry)

        assert self.transfers is not None
        old_slots = self.transfers.bring(on_host)

        # Barriers, as for rows: what XLA fuses with a transfer is rounded otherwise than the update alone.
        entry = jax.lax.optimization_barrier(entry._replace(slots={**entry.slots, **old_slots}))
        param, slots = jax.lax.optimization_barrier(update(entry))

        sent = self.transfers.send({slot: slots[slot] for slot in on_host}, old_slots)
        return param, {**slots, **sent}


def _placed(
    results: Mapping[tuple[str, ...], tuple[jax.Array, Slots]],
    old: Stacks,
    read: Callable[[tuple[jax.Array, Slots]], jax.Array],
) -> Stacks:
    """The results, stored as the old arrays are; these where there is none.

    Args:
        results: By the names that were updated together.
        old: Arrays of before.
        read: Takes of a result what is to be stored.
    """
    part_of: dict[str, tuple[tuple[str, ...], int]] = {}
    for part in results:
        for row, name in enumerate(part):
            part_of[name] = part, row

    def of_name(name: str) -> jax.Array:
        if name not in part_of:
            return old.kept(name)
        part, row = part_of[name]
        array = read(results[part])
        return array if len(part) == 1 else array[row]

    def of_group(names: tuple[str, ...], before: jax.Array) -> jax.Array:
        if names in results:
            return read(results[names])
        if part_of.keys().isdisjoint(names):
            return before
        if len(names) == 1:
            return of_name(names[0])
        return jnp.stack([of_name(name) for name in names])

    return Stacks(old.layout, map(of_group, old.layout.groups, old.arrays))


def update_tensor(rule: Rule, flags: Flags, entry: Entry, scalars: Scalars) -> tuple[jax.Array, Slots]:
    """A rule in float32 at least; of complex numbers, on real and imaginary parts."""
    _, param, slots = entry
    is_complex = jnp.iscomplexobj(param)
    if is_complex and not rule.by_element:
        raise ValueError("torch has no such step for complex parameters.")

    def wide(x: jax.Array) -> jax.Array:
        if is_complex:
            x = jnp.stack([x.real, x.imag], -1)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def narrow(x: jax.Array, like: jax.Array) -> jax.Array:
        if is_complex:
            x = jax.lax.complex(x[..., 0], x[..., 1])
        return x.astype(like.dtype)

    # Scalars are float64 if any parameter of the optimizer is, and would widen the update of a float32 one.
    dtype = wide(param).dtype
    typed_scalars: dict[str, jax.Array] = {}
    for name, value in scalars.items():
        typed_scalars[name] = value if value.dtype == bool else value.astype(dtype)

    new_param, new_slots = rule.update(jax.tree.map(wide, entry), typed_scalars, flags)
    return narrow(new_param, param), {name: narrow(value, slots[name]) for name, value in new_slots.items()}


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
    if decay is None:
        return
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(
            f"{caller()}: ema must be the decay of the average, at least 0 and less than 1, such as 0.999, "
            f"got {decay!r}."
        )


def averaged(ema: Stacks, params: Stacks, decay: float) -> Stacks:
    """The averages after an update, `decay * ema + (1 - decay) * parameter`, in float32 at least."""

    def moved(names: tuple[str, ...], old: jax.Array) -> jax.Array:
        new = stored_rows(params, names)
        dtype = jnp.promote_types(old.dtype, jnp.float32)
        average = decay * old.astype(dtype) + (1 - decay) * new.astype(dtype)
        return average.astype(old.dtype)

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
