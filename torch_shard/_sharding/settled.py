"""Where what is computed is laid out: in two steps, where XLA's partitioner would err in one."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import jax
from jax.sharding import NamedSharding, PartitionSpec


def settled(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that is computed, laid out like this; of a dim that is split over several axes, over the first before.

    At once, XLA's partitioner permutes the shards of some (jaxlib 0.10.2; tests/system/test_upstream.py): a gradient
    whose producer has its axes in other places, or a dim that was put together of two. `python -m tests.fuzz --xla`
    looks for layouts that this does not mend.
    """
    first = PartitionSpec(*(part[0] if isinstance(part, tuple) and part else part for part in sharding.spec))
    if first != sharding.spec:
        array = jax.lax.with_sharding_constraint(array, NamedSharding(sharding.mesh, first))
    return jax.lax.with_sharding_constraint(array, sharding)
