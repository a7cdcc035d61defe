"""Where what is computed is laid out: in two steps, where XLA's partitioner would err in one."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from typing import cast

import jax
from jax.sharding import NamedSharding, PartitionSpec


def settled(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that is computed, laid out like this; of a dim that is split over several axes, over the first before.

    For where these are not in the mesh's order (`P(("model", "batch"))` on a mesh `(batch, model)`) and the dim was put
    together of two (heads, and what each has), Shardy splits an axis between the two in what the array is computed
    of, and the values are wrong (jaxlib 0.10.2; tests/system/test_upstream.py).
    """
    order = list(sharding.mesh.axis_names)
    before = PartitionSpec(*(part if _follows(part, order) else part[0] for part in sharding.spec))
    if before != sharding.spec:
        array = jax.lax.with_sharding_constraint(array, NamedSharding(sharding.mesh, before))
    return jax.lax.with_sharding_constraint(array, sharding)


def _follows(part: object, order: list[str]) -> bool:
    """Whether a part of a spec names its axes in this order."""
    axes = cast(tuple[str, ...], part) if isinstance(part, tuple) else ()
    return list(axes) == sorted(axes, key=order.index)
