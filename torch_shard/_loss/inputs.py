"""What a loss program is given, by the numbers of its graph's inputs."""

import copy
from collections.abc import Mapping

import jax

from torch_shard._scan import Bundle, GraphInput, StackRow
from torch_shard._sharding import Kept, Stacks


def in_program(tensors: Mapping[str, jax.Array], name: str) -> jax.Array:
    """An entry as a program takes it: in pieces, if it is kept so."""
    return tensors.in_program(name) if isinstance(tensors, Stacks) else tensors[name]


def forms_of(tensors: Mapping[str, jax.Array]) -> dict[str, Kept]:
    """Those of entries whose gradients a program gives in pieces."""
    forms = tensors.forms if isinstance(tensors, Stacks) else {}
    return {name: form for name, form in forms.items() if form.cut is not None}


class LossInputs:
    """The inputs of a loss program by number: named tensors and bundles of them, then the batch and the closure."""

    def __init__(self, named: list[GraphInput], tensors: Mapping[str, jax.Array], others: list[jax.Array]) -> None:
        self._named, self._tensors, self._others = named, tensors, others
        self._stacks: dict[int, jax.Array] = {}

    def _name(self, at: tuple[int, ...]) -> str | None:
        number, *member = at
        given = self._named[number] if number < len(self._named) else None
        return given.names[member[0]] if isinstance(given, Bundle) else given

    def __getitem__(self, at: tuple[int, ...]) -> jax.Array:
        name = self._name(at)
        if name is None:
            return self._others[at[0] - len(self._named)]
        return in_program(self._tensors, name)

    def of(self, others: list[jax.Array]) -> "LossInputs":
        """The same with another batch and closure."""
        other = copy.copy(self)
        other._others = others
        return other

    def all(self) -> list[jax.Array]:
        return [self[number,] for number in range(len(self._named) + len(self._others))]

    def row(self, at: tuple[int, ...]) -> StackRow | None:
        """The stack of which an input is a row, if it is one."""
        name = self._name(at)
        if name is None or not isinstance(self._tensors, Stacks):
            return None
        found = self._tensors.row(name)
        if found is None or (form := self._tensors.layout.forms.get(name)) is None:
            return None if found is None else StackRow(*found)
        stack, row = found
        if id(stack) not in self._stacks:
            self._stacks[id(stack)] = form.in_program(stack, is_stack=True)
        return StackRow(self._stacks[id(stack)], row)
