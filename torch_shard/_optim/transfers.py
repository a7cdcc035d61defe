"""Arrays of the host's memory in an update: brought in, updated and sent back, one group after the other."""

# JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from torch_shard._common.host_memory import is_on_host, to_device, to_host
from torch_shard._common.types import PyTree

Group = tuple[str, ...]
"""Names that are stored together."""


class RowUpdate(NamedTuple):
    """An update of stacks, row by row.

    Attributes:
        update: `(row of given, row of held) -> new row of held`.
        given: Stacks in the device's memory.
        held: Stacks, of which some lie in the host's memory.
    """

    update: Callable[[PyTree, PyTree], PyTree]
    given: PyTree
    held: PyTree

    @property
    def num_rows(self) -> int:
        """Of its stacks."""
        return len(jax.tree.leaves(self.held)[0])


class HostTransfers:
    """Arrays brought in from the host's memory and sent back, one group after the other.

    A compiler would bring in all of them at once, early on, which then are in the device's memory together. Barriers
    are gone when it makes its schedule. So each transfer is the branch of a conditional, whose predicate is made by the
    transfer before it; both branches are the same.

    Args:
        after: What the first transfer waits for, a scalar.
        replaced: The arrays that get new values, of which some lie in the host's memory.
        skipped: Whether they keep those that they have, bool scalar; None if they never do.
    """

    def __init__(self, after: jax.Array, replaced: PyTree, skipped: jax.Array | None) -> None:
        self._token = after.astype(jnp.float32)
        self._skipped = skipped
        self.replaced: dict[int, jax.Array] = {}
        """By number among the leaves."""
        leaves: list[jax.Array] = jax.tree.leaves(replaced)
        for number, leaf in enumerate(leaves):
            if is_on_host(leaf):
                self.replaced[number] = leaf

    def bring(self, tree: PyTree) -> PyTree:
        """The arrays of a group in the device's memory."""
        return self._in_turn(to_device, tree)

    def send(self, new: PyTree, old: PyTree) -> PyTree:
        """The new arrays of a group in the host's memory, for which the next one waits; `old` as it was brought in."""
        return self._in_turn(to_host, self._unless_skipped(new, old))

    def by_row(self, updates: Mapping[Group, RowUpdate]) -> dict[Group, PyTree]:
        """What is held after updates of stacks, a row of all at a time: while one travels, others are computed."""
        by_count: dict[int, dict[Group, RowUpdate]] = {}
        for group, update in updates.items():
            by_count.setdefault(update.num_rows, {})[group] = update

        new: dict[Group, PyTree] = {}
        for count in sorted(by_count):
            new |= self._loop(count, by_count[count])
        return new

    def _loop(self, count: int, updates: Mapping[Group, RowUpdate]) -> dict[Group, PyTree]:
        def update_row(number: jax.Array, stacks: dict[Group, PyTree]) -> dict[Group, PyTree]:
            return {group: self._with_row(number, update, stacks[group]) for group, update in updates.items()}

        initial = {group: update.held for group, update in updates.items()}
        return jax.lax.fori_loop(0, count, update_row, initial)

    def _with_row(self, number: jax.Array, update: RowUpdate, held: PyTree) -> PyTree:
        """What is held, with one row of its stacks updated in its place."""

        def row(stack: jax.Array) -> PyTree:
            return to_device(jax.lax.dynamic_index_in_dim(stack, number, keepdims=False))

        def placed(stack: jax.Array, new: jax.Array) -> PyTree:
            if is_on_host(stack):
                new = to_host(new)
            return jax.lax.dynamic_update_index_in_dim(stack, new, number, 0)

        old = jax.tree.map(row, held)
        # Barriers, or what XLA fuses with the slices is rounded otherwise than the update of a whole stack.
        rows = jax.lax.optimization_barrier((jax.tree.map(row, update.given), old))
        new = jax.lax.optimization_barrier(update.update(*rows))
        return jax.tree.map(placed, held, self._unless_skipped(new, old))

    def _in_turn(self, move: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
        """Move arrays when the move before is done."""

        def branch(tree: PyTree, token: jax.Array) -> tuple[PyTree, jax.Array]:
            return move(tree), token + 1

        def other_branch(tree: PyTree, token: jax.Array) -> tuple[PyTree, jax.Array]:
            return branch(tree, token)

        # Of the bits, so that the compiler cannot know the answer, whatever the number is (also NaN).
        is_any = jax.lax.bitcast_convert_type(self._token, jnp.int32) != jnp.int32(0)
        # JAX drops the conditional if both branches are one function.
        tree, self._token = jax.lax.cond(is_any, branch, other_branch, tree, self._token)
        return tree

    def _unless_skipped(self, new: PyTree, old: PyTree) -> PyTree:
        skipped = self._skipped
        if skipped is None:
            return new
        return jax.tree.map(lambda before, after: jnp.where(skipped, before, after), old, new)
