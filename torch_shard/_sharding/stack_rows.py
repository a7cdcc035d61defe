"""Where a stack of entries and its rows lie, and how a row is taken from it."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import functools
from collections.abc import Callable
from typing import cast

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from torch_shard._common.simulated import wait_if_simulated
from torch_shard._common.types import PyTree


def stack_sharding(sharding: NamedSharding, axis: str | None = None) -> NamedSharding:
    """Sharding of a stack whose rows lie like this, and are split over an axis; without one each is on all devices."""
    return sharding.update(spec=PartitionSpec(axis, *sharding.spec))


def row_sharding(sharding: NamedSharding) -> NamedSharding:
    """Sharding of a row of a stack."""
    return sharding.update(spec=PartitionSpec(*sharding.spec[1:]))


def stack_struct(rows: list[jax.ShapeDtypeStruct], axis: str | None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a stack of such rows."""
    return moved_struct(rows[0], (len(rows), *rows[0].shape), lambda sharding: stack_sharding(sharding, axis))


def moved_struct(
    struct: jax.ShapeDtypeStruct, shape: tuple[int, ...], move: Callable[[NamedSharding], NamedSharding]
) -> jax.ShapeDtypeStruct:
    """The same dtype in another shape, whose sharding follows."""
    sharding = move(struct.sharding) if isinstance(struct.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)


def take_row(stack: PyTree, row: int) -> PyTree:
    """A row of a stored array, in the place that its sharding gives it; also of a tensor, a struct or a sharding."""
    if isinstance(stack, NamedSharding):
        return row_sharding(stack)
    if isinstance(stack, jax.ShapeDtypeStruct):
        return moved_struct(stack, stack.shape[1:], row_sharding)
    if isinstance(stack, Tracer):
        return jax.lax.index_in_dim(stack, row, keepdims=False)
    if isinstance(stack, jax.Array) and isinstance(stack.sharding, NamedSharding):
        # A compiled program does not look whether its input is deleted, and waits forever for it on some devices.
        if stack.is_deleted():
            raise RuntimeError(
                "This state was donated to a later step, and its arrays are deleted. Read the state that the step "
                "returned, or copy what you need before the step: numpy.asarray(state.params[name])."
            )
        take = _taker(row_sharding(stack.sharding))
        return wait_if_simulated(take(wait_if_simulated(stack), row))
    return stack[row]


@functools.cache
def _taker(sharding: NamedSharding) -> Callable[[jax.Array, int], jax.Array]:
    """One program for all rows of stacks that lie alike."""

    def take(stack: jax.Array, row: int) -> jax.Array:
        return cast(jax.Array, jax.lax.dynamic_index_in_dim(stack, row, keepdims=False))

    return cast(Callable[[jax.Array, int], jax.Array], jax.jit(take, out_shardings=sharding))
