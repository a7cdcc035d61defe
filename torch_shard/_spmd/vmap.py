"""`jax.vmap` of torch callables, with gradients that are right where rows share results.

JAX runs the rule of a `jax.custom_vjp` under a `vmap` outside of it: axis names are unbound, and the gradients of
results that are the same for all rows arrive summed over them. Here the derivative of the map is a map of derivatives.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from torch_shard._common.axes import vjp_of_chosen
from torch_shard._common.convert import spread_prefix
from torch_shard._common.types import PyTree


def vmap_of_arrays(
    fn: Callable[..., PyTree],
    in_axes: tuple[int | None, ...],
    out_axes: PyTree,
    *,
    axis_size: int,
    vmap: Callable[..., Any] = jax.vmap,
) -> Callable[..., PyTree]:
    """`jax.vmap` of a function of arrays that returns a pytree of arrays.

    Args:
        fn: What to map.
        in_axes: The mapped dim of each argument, or None.
        out_axes: As for `jax.vmap`.
        axis_size: How many rows there are.
        vmap: `jax.vmap`, or a partial of it, with an `axis_name` for example.
    """
    mapped = jax.custom_vjp(vmap(fn, in_axes, out_axes, axis_size=axis_size))

    def forward(*arrays: jax.Array) -> tuple[PyTree, tuple[jax.Array, ...]]:
        return mapped(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], cotangents: PyTree) -> tuple[jax.Array | None, ...]:
        leaves, tree = jax.tree.flatten(cotangents)
        axes = spread_prefix(out_axes, tree)
        given = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]
        wanted = [a is not None and jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays]
        # A result that is not mapped is one for all rows: each has its share of the gradient.
        shares = [c if axis is not None else c / axis_size for c, axis, g in zip(leaves, axes, given, strict=True) if g]
        share_axes = [axis for axis, g in zip(axes, given, strict=True) if g]
        pull = functools.partial(_pull, fn, wanted, given)
        run = vmap_of_arrays(pull, (*in_axes, *share_axes), 0, axis_size=axis_size, vmap=vmap)
        grads = iter(run(*arrays, *shares))
        return tuple(_unmap(next(grads), axis) if w else None for axis, w in zip(in_axes, wanted, strict=True))

    mapped.defvjp(forward, backward)
    return mapped


def _pull(
    fn: Callable[..., PyTree], wanted: list[bool], given: list[bool], *inputs: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients of one row."""
    arrays, cotangents = inputs[: len(wanted)], inputs[len(wanted) :]
    return vjp_of_chosen(fn, arrays, wanted, given)[1](list(cotangents))


def _unmap(rows: jax.Array, axis: int | None) -> jax.Array:
    return rows.sum(0) if axis is None else jnp.moveaxis(rows, 0, axis)
