"""Collectives on torch tensors by axis name: the public `torch_shard.collectives` says what they mean."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_shard._capture import current_values
from torch_shard._common.axes import manual_axes, tracked_axes, vary
from torch_shard._common.caller import caller, public
from torch_shard._common.random import fold_axes, wrap_seed
from torch_shard._interop import call_jax
from torch_shard._spmd.check_collectives import check_dim, check_pairs, check_split, map_tensors, sizes_of

T = TypeVar("T")

Axis = str | tuple[str, ...]

Variation = Literal["varying", "invarying"]


@public
def psum(x: T, axis: Axis) -> T:
    """Sum over the devices of an axis.

    Args:
        x: Tensors of any shape and dtype (bool counts as int64), the same shape on each device; a Python number counts
            once for each device, so that `psum(1, "i")` is the size of the axis.
        axis: Name or names of axes.

    Returns:
        The sum, of the shape of `x`, the same on all devices of the axis.

    Example:
        >>> import jax, torch, torch_shard as ts
        >>> from torch_shard.collectives import psum
        >>> ts.jax_vmap(lambda x: x / psum(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0])).tolist()
        [0.25, 0.75]
    """
    sizes = sizes_of(axis)
    count = math.prod(sizes.values())
    return map_tensors(x, lambda t: _call(_psum, t, tuple(sizes)), of_number=lambda n: n * count)


@public
def pmean(x: T, axis: Axis) -> T:
    """Mean over the devices of an axis.

    Args:
        x: Floating-point or complex tensors of any shape, the same shape on each device; a Python number is its own
            mean.
        axis: Name or names of axes.

    Returns:
        The mean, of the shape of `x`, the same on all devices of the axis.

    Raises:
        TypeError: A tensor holds integers or bools.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import pmean
        >>> ts.jax_vmap(lambda x: x - pmean(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """
    sizes = sizes_of(axis)
    count = math.prod(sizes.values())

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            raise TypeError(f"{caller()}: a mean needs floating-point numbers, got {t.dtype}. Use x.float(), or psum.")
        return _call(_psum, t, tuple(sizes)) / count

    return map_tensors(x, of_tensor, of_number=lambda n: n)


@public
def pmax(x: T, axis: Axis) -> T:
    """Largest over the devices of an axis, by element; the shape stays.

    The gradient is divided among the devices that hold the largest, as `torch.amax` divides it among entries.

    Args:
        x: Real tensors of any shape, the same shape on each device; a Python number stays as it is.
        axis: Name or names of axes.

    Returns:
        The largest, of the shape of `x`, the same on all devices of the axis.

    Raises:
        TypeError: A tensor is complex.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import pmax
        >>> ts.jax_vmap(lambda x: x / pmax(x, "i"), axis_name="i")(torch.tensor([1.0, 4.0])).tolist()
        [0.25, 1.0]
    """
    return _extreme(x, axis, lax.pmax)


@public
def pmin(x: T, axis: Axis) -> T:
    """Smallest over the devices of an axis, by element; the shape stays.

    The gradient is divided among the devices that hold the smallest, as `torch.amin` divides it among entries.

    Args:
        x: Real tensors of any shape, the same shape on each device; a Python number stays as it is.
        axis: Name or names of axes.

    Returns:
        The smallest, of the shape of `x`, the same on all devices of the axis.

    Raises:
        TypeError: A tensor is complex.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import pmin
        >>> ts.jax_vmap(lambda x: x - pmin(x, "i"), axis_name="i")(torch.tensor([1.0, 4.0])).tolist()
        [0.0, 3.0]
    """
    return _extreme(x, axis, lax.pmin)


@public
def all_gather(x: T, axis: Axis, *, dim: int = 0, tiled: bool = True, to: Variation = "varying") -> T:
    """Concatenate the tensors of all devices of an axis along a dim, in the order of their indices.

    Args:
        x: Tensors of shape `(..., local, ...)`.
        axis: Name or names of axes.
        dim: The dim that grows, -1 for the last.
        tiled: True concatenates; False stacks along a new dim, which is then `dim` of the result.
        to: "varying", or "invarying" if the result is to leave `jax_shard_map` with a spec that does not name the axis.
            The gradient of the first is a `psum_scatter`, that of the second may need a sum over all devices.

    Returns:
        Tensors of shape `(..., local * size of the axis, ...)`, or `(..., size of the axis, ...)` with a new dim; the
        same on all devices of the axis.

    Raises:
        IndexError: The tensors have no such dim, with `tiled` a ValueError.
        ValueError: `to` is neither of the two words.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import all_gather
        >>> rows = torch.tensor([[1], [2]])
        >>> ts.jax_vmap(lambda row: all_gather(row, "i"), axis_name="i")(rows).tolist()
        [[1, 2], [1, 2]]
    """
    axes = tuple(sizes_of(axis))

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        t = t if tiled else t.unsqueeze(dim)
        return _call(_all_gather, t, axes, dim, to)

    return map_tensors(x, of_tensor)


@public
def psum_scatter(x: T, axis: Axis, *, dim: int = 0) -> T:
    """Sum over the devices of an axis, of which each keeps its part along a dim.

    Args:
        x: Tensors of shape `(..., local * size of the axis, ...)`.
        axis: Name or names of axes.
        dim: The dim that is split, -1 for the last.

    Returns:
        Tensors of shape `(..., local, ...)`: the part of the sum that belongs to the device's index.

    Raises:
        ValueError: The dim does not divide by the size of the axis.
        IndexError: The tensors have no such dim.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import psum_scatter
        >>> rows = torch.tensor([[1, 2], [10, 20]])
        >>> ts.jax_vmap(lambda row: psum_scatter(row, "i"), axis_name="i")(rows).tolist()
        [[11], [22]]
    """
    sizes = sizes_of(axis)

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        return _call(_psum_scatter, t, tuple(sizes), check_split(t, dim, sizes))

    return map_tensors(x, of_tensor)


@public
def all_to_all(x: T, axis: Axis, *, split_dim: int, concat_dim: int) -> T:
    """Split along one dim, send the n-th part to the n-th device of an axis, and concatenate what arrives.

    Args:
        x: Tensors of shape `(..., a * size of the axis, ..., b, ...)`, at `split_dim` and `concat_dim`.
        axis: Name or names of axes.
        split_dim: The dim to split, -1 for the last.
        concat_dim: The dim along which parts arrive, in the order of the devices that sent them.

    Returns:
        Tensors of shape `(..., a, ..., b * size of the axis, ...)`.

    Raises:
        ValueError: `split_dim` does not divide by the size of the axis.
        IndexError: The tensors lack one of the dims.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import all_to_all
        >>> rows = torch.tensor([[1, 2], [3, 4]])
        >>> ts.jax_vmap(lambda row: all_to_all(row, "i", split_dim=0, concat_dim=0), axis_name="i")(rows).tolist()
        [[1, 3], [2, 4]]
    """
    sizes = sizes_of(axis)

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        split = check_split(t, split_dim, sizes)
        return _call(_all_to_all, t, tuple(sizes), split, check_dim(t, concat_dim))

    return map_tensors(x, of_tensor)


@public
def ppermute(x: T, axis: Axis, pairs: Sequence[tuple[int, int]]) -> T:
    """Send tensors from device to device along an axis.

    Args:
        x: Tensors of any shape, which stays.
        axis: Name or names of axes.
        pairs: `(source, destination)` indices along the axis. No device sends twice or receives twice; one that
            receives nothing gets zeros.

    Returns:
        What each device received, of the shape of `x`.

    Raises:
        ValueError: An index is out of range, or stands twice among the sources or among the destinations.
        NotImplementedError: Several axes are not all of one mesh, as with that of a `jax_vmap`.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import ppermute
        >>> ring = [(0, 1), (1, 2), (2, 0)]
        >>> ts.jax_vmap(lambda x: ppermute(x, "i", ring), axis_name="i")(torch.tensor([1, 2, 3])).tolist()
        [3, 1, 2]
    """
    sizes = sizes_of(axis)
    checked = check_pairs(pairs, math.prod(sizes.values()))
    if len(sizes) > 1 and not sizes.keys() <= manual_axes().keys():
        raise NotImplementedError(
            f"{caller()}: {' and '.join(map(repr, sizes))} are not all axes of one mesh, and JAX would send along one "
            "of them alone. Use one after the other."
        )
    return map_tensors(x, lambda t: _call(_ppermute, t, tuple(sizes), checked))


@public
def axis_index(axis: Axis) -> torch.Tensor:
    """Index of the device along an axis.

    Args:
        axis: Name or names of axes; several count as one axis, the first name slowest.

    Returns:
        An int64 scalar, from 0 to the size of the axis less one.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import axis_index
        >>> ts.jax_vmap(lambda x: x + axis_index("i"), axis_name="i")(torch.tensor([10, 20])).tolist()
        [10, 21]
    """
    axes = tuple(sizes_of(axis))
    return call_jax(lambda: lax.axis_index(axes)).long()


@public
def axis_size(axis: Axis) -> int:
    """Number of devices along an axis.

    Args:
        axis: Name or names of axes.

    Returns:
        A Python number: the size of the axis, of several axes the product of their sizes.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import axis_size
        >>> ts.jax_vmap(lambda x: x / axis_size("i"), axis_name="i")(torch.tensor([1.0, 3.0])).tolist()
        [0.5, 1.5]
    """
    return math.prod(sizes_of(axis).values())


@overload
def fold_in_axis(key: torch.Tensor, axis: Axis) -> torch.Tensor: ...


@overload
def fold_in_axis(key: Axis) -> contextlib.AbstractContextManager[None]: ...


@public
def fold_in_axis(
    key: torch.Tensor | Axis, axis: Axis | None = None
) -> torch.Tensor | contextlib.AbstractContextManager[None]:
    """Random numbers that differ along an axis, and agree along all others.

    `with fold_in_axis("i"):` lets what torch draws within (`torch.rand`, dropout) differ by index along `"i"`; without
    it, all devices draw the same. `fold_in_axis(key, "i")` does it for a key.

    Args:
        key: The words of a JAX key, (2,) uint32, as `jax.random.key_data` gives them; or the axis, alone.
        axis: Name or names of axes.

    Returns:
        Another key, (2,) uint32; or a context manager.

    Raises:
        TypeError: `key` is not the words of a key.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import fold_in_axis
        >>> def noise(x):
        ...     with fold_in_axis("i"):
        ...         return x + torch.randn(())
        >>> first, second = ts.jax_vmap(noise, axis_name="i")(torch.zeros(2))
        >>> bool(first == second)
        False
    """
    if axis is None:
        along = tuple(sizes_of(key))
        return current_values().drawing_along(along)
    axes = tuple(sizes_of(axis))
    if not isinstance(key, torch.Tensor) or key.dtype != torch.uint32:
        raise TypeError(
            f"{caller()}: a key is the two words of a JAX key, (2,) uint32. Take them with "
            "jax.random.key_data(jax.random.key(seed)), or pass an axis alone."
        )
    return call_jax(lambda words: jax.random.key_data(fold_axes(wrap_seed(words), axes)), key)


# What JAX does.


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(_varied(x, axes), axes)


def _all_gather(x: jax.Array, axes: tuple[str, ...], dim: int, to: Variation) -> jax.Array:
    x = _varied(x, axes)
    # JAX takes `to` only where it tracks what varies.
    options = {"to": to} if tracked_axes() else {}
    for axis in reversed(axes):
        x = lax.all_gather(x, axis, axis=dim, tiled=True, **options)
    return x


def _psum_scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    x = _varied(x, axes)
    for axis in axes:
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x


def _all_to_all(x: jax.Array, axes: tuple[str, ...], split: int, concat: int) -> jax.Array:
    return lax.all_to_all(_varied(x, axes), axes, split, concat, tiled=True)


def _ppermute(x: jax.Array, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    return lax.ppermute(_varied(x, axes), axes, pairs)


def _extreme(x: T, axis: Axis, reduce: Callable[..., jax.Array]) -> T:
    axes = tuple(sizes_of(axis))

    def plain(a: jax.Array) -> jax.Array:
        return reduce(_varied(a, axes), axes)

    smooth = jax.custom_jvp(plain)

    @smooth.defjvp
    def derivative(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (a,) = primals
        (tangent,) = tangents
        # By the rule, not by `plain`: whoever differentiates this rule differentiates its value too.
        best = smooth(a)
        is_best = a == best
        num_best = _psum(is_best.astype(a.dtype), axes)
        share = jnp.where(is_best, tangent, 0) / num_best
        return best, _psum(share, axes)

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        if t.is_complex():
            raise TypeError(f"{caller()}: complex numbers have no order, got {t.dtype}.")
        if t.dtype == torch.bool:
            return of_tensor(t.int()).bool()
        return _call(smooth if t.is_floating_point() else plain, t)

    return map_tensors(x, of_tensor, of_number=lambda n: n)


def _varied(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The same values, as ones that may differ over these axes, where JAX tracks that (see `_common.axes`)."""
    known = tracked_axes()
    others = [axis for axis in axes if axis not in known]
    if known and others:
        raise NotImplementedError(
            f"{others[0]!r} is the axis_name of a jax_vmap, along which JAX cannot communicate within jax_shard_map "
            "while it tracks what varies. Give jax_shard_map check_vma=False, or reduce the dim without jax_vmap."
        )
    return vary(x, axes) if known else x


def _call(fn: Callable[..., jax.Array], t: torch.Tensor, *args: object) -> torch.Tensor:
    # Like `torch.sum`, a sum of bools is int64.
    is_count = t.dtype == torch.bool and fn in (_psum, _psum_scatter)
    dtype = torch.int64 if is_count else t.dtype
    return call_jax(lambda a: fn(a, *args), t).to(dtype)
