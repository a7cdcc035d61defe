"""The named axes that code is mapped over while JAX traces it, and what varies over them.

Inside `shard_map`, JAX knows of each value over which axes it may differ between devices, and demands of each gradient
that it varies over the same axes as its value. PyTorch's autograd knows nothing of that. So within a captured
derivative a gradient is a *share*: the gradient is the sum of the shares of all devices, whatever varies. Every
operator on one device, and every collective as a linear map between devices, carries shares to shares; sums of shares
are shares. Where gradients come from JAX they are divided into shares, and where they go back the shares are summed, at
no cost over the axes along which they are all the same.
"""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from torch_shard._common.types import PyTree

T = TypeVar("T")

Pulled = tuple[T, Callable[[T], tuple[jax.Array, ...]]]
"""Result of `jax.vjp`: the value of a function, and the map from its gradient to those of the arguments."""


def size_of(axis: str) -> int | None:
    """Number of indices that a named axis has here; None where it is not bound."""
    try:
        return lax.axis_size(axis)
    except (NameError, KeyError):
        return None


def manual_axes() -> dict[str, int]:
    """Mesh axes that the code under way is written for one device of, with their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis: mesh.shape[axis] for axis, kind in kinds if kind == AxisType.Manual}


def tracked_axes() -> dict[str, int]:
    """The manual axes, if JAX tracks what varies over them (`check_vma=True`)."""
    axes = manual_axes()
    return axes if axes and varying(lax.axis_index(next(iter(axes)))) else {}


def still_hold(sizes: Mapping[str, int]) -> bool:
    """Tell whether all these axes are bound here, with these sizes."""
    return all(size_of(axis) == size for axis, size in sizes.items())


def varying(value: object) -> frozenset[str]:
    """The manual axes over which a value may differ."""
    kind: Any = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    found = kind.vma if hasattr(kind, "vma") else getattr(kind.manual_axis_type, "varying", None)  # 0.10.0, later JAX
    return cast(frozenset[str] | None, found) or frozenset()


def vary(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same value, as one that may differ over these axes too."""
    missing = tuple(axis for axis in axes if axis not in varying(value))
    if not missing:
        return value
    return cast(jax.Array, lax.pcast(value, missing, to="varying"))


def vary_like(tree: PyTree, *others: PyTree) -> PyTree:
    """The same values, as ones that may differ wherever they or the others do: what a loop carries keeps its type."""
    axes = frozenset[str]().union(*(varying(leaf) for leaf in jax.tree.leaves((tree, others))))

    def varied(leaf: jax.Array) -> jax.Array:
        return vary(leaf, axes)

    return jax.tree.map(varied, tree) if axes else tree


def local_vjp(
    fn: Callable[..., jax.Array], *primals: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Value of `fn`, and the shares that one device has in the gradients of its arguments.

    `jax.vjp` itself would sum them over the devices, where an argument is the same on all.
    """
    if tracked_axes():
        primals = vary_like(primals, jax.eval_shape(fn, *primals), cotangent)
    value, pull = cast(Pulled[jax.Array], jax.vjp(fn, *primals))
    return value, pull(vary_like(cotangent, value))


def vjp_of_chosen(
    fn: Callable[..., PyTree], primals: Sequence[jax.Array], wanted: Sequence[bool], given: Sequence[bool]
) -> Pulled[list[jax.Array]]:
    """`jax.vjp` of a function of arrays, by the wanted ones of them, and of the given leaves of what it returns."""

    def of_wanted(*chosen: jax.Array) -> list[jax.Array]:
        values = iter(chosen)
        outputs = jax.tree.leaves(fn(*(next(values) if w else p for p, w in zip(primals, wanted, strict=True))))
        return [*itertools.compress(outputs, given)]

    return cast(Pulled[list[jax.Array]], jax.vjp(of_wanted, *itertools.compress(primals, wanted)))


def map_together(outputs: list[jax.Array], inputs: Iterable[jax.Array]) -> list[jax.Array]:
    """The same outputs; where `jax.vmap` maps any input, it maps every output.

    The gradient of an output that is not mapped reaches the rule of a `jax.custom_vjp` as a sum over the rows, and that
    of a mapped one row by row. What both give to an input that is not mapped would then be summed once more.
    """

    @jax.custom_batching.custom_vmap
    def same(outputs: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        return outputs

    @same.def_vmap
    def rule(axis_size: int, is_mapped: PyTree, outputs: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
        rows = [
            out if mapped else jnp.broadcast_to(out, (axis_size, *out.shape))
            for out, mapped in zip(outputs, is_mapped[0], strict=True)
        ]
        return map_together(rows, inputs), [True] * len(rows)

    return same(outputs, list(inputs))


def into_shares(gradient: jax.Array, value: jax.Array | None = None) -> jax.Array:
    """The gradient of a value, divided among the devices that hold the same value."""
    kind = varying(gradient if value is None else value)
    count = math.prod(size for axis, size in tracked_axes().items() if axis not in kind)
    return gradient / count if count > 1 else gradient


def sum_shares(share: jax.Array, value: jax.Array) -> jax.Array:
    """The gradient of a value, of the type that JAX demands: summed over the axes along which the value is the same."""
    axes = {axis: size for axis, size in tracked_axes().items() if axis not in varying(value)}
    apart = tuple(axis for axis in axes if axis in varying(share))
    alike = math.prod(size for axis, size in axes.items() if axis not in apart)
    total = cast(jax.Array, lax.psum(share, apart)) if apart else share
    return vary(total * alike if alike > 1 else total, varying(value))
