"""Where what is computed is laid out: in two steps, where XLA's partitioner would err in one."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from collections.abc import Collection, Iterable

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from torch_shard._common.specs import axes_of, has_three_axes
from torch_shard._sharding.stacked import Stacks


def constrain_stacks(stacks: Stacks, shardings: Iterable[NamedSharding], rows: Collection[str]) -> Stacks:
    """Gradients, or what they are added to, laid out like this; of a dim that is split over several axes, in two steps.

    At once, XLA's partitioner permutes the shards of some (jaxlib 0.10.2; tests/system/test_upstream.py). The axis that
    comes first is one of features, along which the gradient lies as it is computed. On meshes of three axes, vectors,
    which are sums of activations, are split over the axes of the batch last of all, or the features of these would be,
    too. (Elsewhere not: TPU's compiler would sum all gradients whole, and not scatter them.)
    """

    def constrained(group: tuple[str, ...], array: jax.Array, sharding: NamedSharding) -> jax.Array:
        entry_shape = array.shape[1:] if len(group) > 1 else array.shape
        num_dims = sum(size > 1 for size in entry_shape)
        is_vector = has_three_axes(sharding.mesh) and num_dims == 1
        return constrain_in_steps(array, sharding, rows, is_vector=is_vector)

    return Stacks(stacks.layout, map(constrained, stacks.layout.groups, stacks.arrays, shardings))


def constrain_in_steps(
    array: jax.Array, sharding: NamedSharding, rows: Collection[str], *, is_vector: bool = False
) -> jax.Array:
    """An array of a program, split over one axis of each dim first, and then over all.

    Args:
        array: As it was computed.
        sharding: Where it is to lie; `PartitionSpec.UNCONSTRAINED` leaves a dim to the compiler.
        rows: The axes of the batch.
        is_vector: Dims that are split over axes of the batch alone are whole at first.
    """
    mesh = sharding.mesh
    first_parts: list[object] = []
    for part in sharding.spec:
        if part is PartitionSpec.UNCONSTRAINED:
            first_parts.append(part)
        else:
            first_parts.append(_first(axes_of((part,)), mesh, rows, is_vector))

    first_spec = PartitionSpec(*first_parts)
    if first_spec != sharding.spec:
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, first_spec))
    return jax.lax.with_sharding_constraint(array, sharding)


def _first(axes: list[str], mesh: Mesh | AbstractMesh, rows: Collection[str], is_vector: bool) -> str | None:
    """The axis over which a dim is split at first."""
    # An axis of size 1 splits nothing, and comes first only where there is no other.
    axes = [axis for axis in axes if mesh.shape[axis] > 1] or axes
    for axis in axes:
        if axis not in rows:
            return axis
    if is_vector or not axes:
        return None
    return axes[0]


def spec_in_use(sharding: NamedSharding, rows: Collection[str]) -> PartitionSpec | None:
    """How an entry is split where a program uses it, if that is less than where it is stored.

    On a mesh of three axes or more, what is computed of an entry that has several in one dim would take that layout
    over, and XLA's partitioner errs there: it is gathered over all of these but one of features. Where rows lie over
    several axes, one that an entry has too would move from the rows to other dims: it is gathered over all of them.
    """
    mesh = sharding.mesh
    if not has_three_axes(mesh):
        return None

    num_axes_of_rows = sum(mesh.shape[axis] > 1 for axis in rows)
    has_fault = False
    parts: list[str | None] = []
    for part in sharding.spec:
        axes = axes_of((part,))
        shares_axis_of_rows = num_axes_of_rows > 1 and any(axis in rows for axis in axes)
        has_fault |= len(axes) > 1 or shares_axis_of_rows
        parts.append(_first(axes, mesh, rows, is_vector=True))
    return PartitionSpec(*parts) if has_fault else None
