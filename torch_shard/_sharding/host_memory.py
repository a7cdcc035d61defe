"""Memory of the host beside a device's own: what lies there within a program, and how it comes and goes."""

# JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from torch_shard._common.types import PyTree

PINNED = "pinned_host"
"""JAX's kind of memory of the host that a device copies from and to."""


def is_on_host(array: jax.Array) -> bool:
    """Tell whether an array of a program lies in the host's memory; JAX refuses to compute with it there."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host


def to_host(tree: PyTree) -> PyTree:
    """The same arrays in the host's memory."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """The same arrays in the device's memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def is_pinned(sharding: Sharding) -> bool:
    """Tell whether what lies so is in the host's memory."""
    return sharding.memory_kind == PINNED


def pinned(sharding: NamedSharding) -> NamedSharding:
    """The same place in the host's memory."""
    return sharding.with_memory_kind(PINNED)


class HostTransfers:
    """Arrays brought in from the host's memory and sent back, one group after the other.

    A compiler would bring in all of them at once, which then are in the device's memory together. So a group waits for
    the one before it to be back.

    Args:
        after: What the first group waits for.
        replaced: The arrays that get new values, of which some lie in the host's memory.
        skipped: Whether they keep those that they have, bool scalar; None if they never do.
    """

    def __init__(self, after: jax.Array, replaced: PyTree, skipped: jax.Array | None) -> None:
        self._sent, self._skipped = after, skipped
        leaves: list[jax.Array] = jax.tree.leaves(replaced)
        self.replaced = {number: leaf for number, leaf in enumerate(leaves) if is_on_host(leaf)}
        """By number among the leaves."""

    def bring(self, tree: PyTree) -> PyTree:
        """The arrays of a group in the device's memory."""
        tree, _ = jax.lax.optimization_barrier((tree, self._sent))
        return to_device(tree)

    def send(self, new: PyTree, old: PyTree) -> PyTree:
        """The new arrays of a group in the host's memory, for which the next one waits; `old` as it was brought in."""
        self._sent = to_host(self._kept(new, old))
        return self._sent

    def by_row(
        self, update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], given: PyTree, held: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Update stacks in the host's memory a row at a time.

        Args:
            update: `(row of given, row of held) -> (result, new row of held)`.
            given: Stacks in the device's memory.
            held: Stacks in the host's memory.

        Returns:
            The results, stacked, and what is held then.
        """
        held, _ = jax.lax.optimization_barrier((held, self._sent))

        def one(held: PyTree, at: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
            number, given = at
            old = to_device(jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), held))
            result, new = jax.lax.optimization_barrier(update(*jax.lax.optimization_barrier((given, old))))
            new = to_host(self._kept(new, old))
            update_row = jax.lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda all_rows, row: update_row(all_rows, row, number, 0), held, new), result

        count = len(jax.tree.leaves(held)[0])
        self._sent, results = jax.lax.scan(one, held, (jnp.arange(count), given))
        return results, self._sent

    def _kept(self, new: PyTree, old: PyTree) -> PyTree:
        skipped = self._skipped
        return new if skipped is None else jax.tree.map(lambda a, b: jnp.where(skipped, a, b), old, new)
