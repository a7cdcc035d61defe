"""Memory of the host beside a device's own: what lies there within a program, and how it comes and goes."""

# JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import jax
from jax.sharding import NamedSharding, Sharding

from torch_shard._common.types import PyTree

PINNED = "pinned_host"
"""JAX's kind of memory of the host that a device copies from and to."""


def is_on_host(array: jax.Array) -> bool:
    """Tell whether an array of a program lies in the host's memory; JAX refuses to compute with it there."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


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
