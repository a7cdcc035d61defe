"""What a loss program is given, by the numbers of its graph's inputs."""

import copy
from collections.abc import Mapping

import jax

from torch_shard._common.pieces import InPieces
from torch_shard._scan import Bundle, GraphInput, StackRow
from torch_shard._sharding import Stacks


class LossInputs:
    """The inputs of a loss program by number: named tensors and bundles of them, then the batch and the closure."""

    def __init__(self, named: list[GraphInput], tensors: Mapping[str, jax.Array], others: list[jax.Array]) -> None:
        self._named, self._tensors, self._others = named, tensors, others
        self._stacks: dict[int, InPieces | jax.Array] = {}

    def _name(self, at: tuple[int, ...]) -> str | None:
        number, *member = at
        given = self._named[number] if number < len(self._named) else None
        return given.names[member[0]] if isinstance(given, Bundle) else given

    def __getitem__(self, at: tuple[int, ...]) -> jax.Array:
        name = self._name(at)
        if name is None:
            return self._others[at[0] - len(self._named)]
        return self._tensors.in_program(name) if isinstance(self._tensors, Stacks) else self._tensors[name]

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
