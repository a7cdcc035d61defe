"""A rule applied to arrays as they are stored: one by one, or rows of a stack at once."""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_shard._optim.rule import Entry, Flags, Rule, Scalars, Slots, frozen_flags
from torch_shard._sharding import Stacks


@dataclasses.dataclass(frozen=True)
class StoredUpdate:
    """One step of a rule.

    Attributes:
        rule: The rule.
        scalars: Coefficients of all parameters, `(num_params,)`.
        given: For each parameter that is updated its place among these, and its flags. Others stay as they are, and
            what is kept for them.
    """

    rule: Rule
    scalars: Scalars
    given: Mapping[str, tuple[int, Flags]]

    def updated(
        self, grads: Stacks, slots: Mapping[str, Mapping[str, Any]], params: Stacks
    ) -> tuple[Stacks, dict[str, Mapping[str, jax.Array]]]:
        """The new parameters and slots, stored as the old ones."""
        arrays: list[jax.Array] = []
        new: dict[str, dict[tuple[str, ...], jax.Array]] = {slot: {} for slot in slots}
        for names, grad, param in zip(params.layout.groups, grads.arrays, params.arrays, strict=True):
            parts = [names] if self._is_one(names) else [(name,) for name in names]
            results = list[jax.Array]()
            for part in parts:
                whole = len(parts) == 1
                given = (grad, param) if whole else (grads.kept(part[0]), params.kept(part[0]))
                param_of_part, slots_of_part = self._of_part(part, given, slots)
                results.append(param_of_part)
                for slot, value in slots_of_part.items():
                    new[slot][part] = value
            arrays.append(results[0] if len(parts) == 1 else jnp.stack(results))
        stored = {slot: _stored(slots[slot], values) for slot, values in new.items()}
        return Stacks(params.layout, arrays), stored

    def _is_one(self, names: tuple[str, ...]) -> bool:
        """Tell whether the rows of a stack are updated alike, up to numbers."""
        kinds = {frozen_flags(self.given[name][1]) if name in self.given else None for name in names}
        return len(kinds) == 1

    def _of_part(
        self,
        names: tuple[str, ...],
        given: tuple[jax.Array, jax.Array],
        slots: Mapping[str, Mapping[str, Any]],
    ) -> tuple[jax.Array, Slots]:
        """The update of a stored array, whose rows have the same flags."""
        grad, param = given
        held = {n: _kept(values, names) for n, values in slots.items() if names[0] in values}
        if names[0] not in self.given:
            return param, held
        entry = Entry(grad, param, held)
        update = functools.partial(update_tensor, self.rule, self.given[names[0]][1])
        at = [self.given[name][0] for name in names]
        if len(at) == 1:
            scalars = {key: jax.lax.index_in_dim(own, at[0], keepdims=False) for key, own in self.scalars.items()}
            return update(entry, scalars)
        return jax.vmap(update)(entry, {key: own[np.array(at)] for key, own in self.scalars.items()})


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


def _kept(values: Mapping[str, Any], names: tuple[str, ...]) -> jax.Array:
    """What is stored for these names, as it is stored."""
    if isinstance(values, Stacks):
        return values.kept(names[0]) if len(names) == 1 else values.kept_rows(names)
    return values[names[0]] if len(names) == 1 else jnp.stack([values[name] for name in names])


def _stored(like: Mapping[str, Any], values: Mapping[tuple[str, ...], jax.Array]) -> Mapping[str, Any]:
    """New values in the layout of the old ones."""
    if not isinstance(like, Stacks):
        return {
            name: value if len(names) == 1 else value[i]
            for names, value in values.items()
            for i, name in enumerate(names)
        }
    rows = {name: (names, i) for names in values for i, name in enumerate(names)}

    def gathered(group: tuple[str, ...]) -> jax.Array:
        if group in values:
            return values[group]
        parts = [values[names] if len(names) == 1 else values[names][i] for names, i in map(rows.__getitem__, group)]
        return parts[0] if len(parts) == 1 else jnp.stack(parts)

    return Stacks(like.layout, map(gathered, like.layout.groups))
