"""Communication between the devices, or the mapped rows, of a named axis; on torch tensors, by axis name.

They work inside a torch function that is mapped over named axes: by `jax_shard_map` (the axes of its mesh), or by
`jax_pmap`, `jax_vmap` and `tpmap` (their `axis_name`). Each takes one name, or several as a tuple (as one axis, the
first name slowest), and a tensor or a pytree of tensors; shapes are those of one device. Gradients flow through all of
them, and through `jax_shard_map` they are those of the unsharded computation.

Inside `jax_shard_map`, `jax_value_and_grad` means what it means in JAX: the gradient by a value that is the same on all
devices is summed over the devices. PyTorch's own `torch.autograd.grad` there means what it means in
`torch.distributed`, with a process for each device: each differentiates by its own copy, and what it differentiates
counts once per device. Hooks on gradients see one device's share, of which the gradient is the sum.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_shard._axes import manual_axes, size_of, tracked_axes, vary
from torch_shard._calls import call_jax
from torch_shard._convert import adopt_torch_nodes
from torch_shard._keys import fold_axes, wrap_seed
from torch_shard._values import drawing_along
from torch_shard._watch import current_watch

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "fold_in_axis",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
]

Axis = str | tuple[str, ...]


def psum(x: Any, axis: Axis) -> Any:
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
    sizes = _check_axes("psum", axis)
    count = math.prod(sizes.values())
    return _map("psum", x, lambda t: _call(_psum, t, tuple(sizes)), of_number=lambda n: n * count)


def pmean(x: Any, axis: Axis) -> Any:
    """Mean over the devices of an axis: floating-point or complex tensors of any shape, which stays."""
    sizes = _check_axes("pmean", axis)
    count = math.prod(sizes.values())

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            raise TypeError(f"pmean: a mean needs floating-point numbers, got {_describe(t)}. Use x.float(), or psum.")
        return _call(_psum, t, tuple(sizes)) / count

    return _map("pmean", x, of_tensor, of_number=lambda n: n)


def pmax(x: Any, axis: Axis) -> Any:
    """Largest over the devices of an axis, by element; the shape stays.

    As for `torch.amax`, the gradient is divided among the devices that hold the largest.
    """
    return _extreme("pmax", x, axis, lax.pmax)


def pmin(x: Any, axis: Axis) -> Any:
    """Smallest over the devices of an axis, by element; see `pmax`."""
    return _extreme("pmin", x, axis, lax.pmin)


def all_gather(x: Any, axis: Axis, *, dim: int = 0, to: str = "varying") -> Any:
    """Concatenate the tensors of all devices of an axis along a dim, in the order of their indices.

    Args:
        x: Tensors of shape `(..., local, ...)`.
        axis: Name or names of axes.
        dim: The dim that grows, -1 for the last.
        to: "varying", or "invarying" if the result is to leave `jax_shard_map` with a spec that does not name the axis.
            The gradient of the first is a `psum_scatter`, that of the second may need a sum over all devices.

    Returns:
        Tensors of shape `(..., local * size of the axis, ...)`, the same on all devices of the axis.
    """
    axes = tuple(_check_axes("all_gather", axis))
    if to not in ("varying", "invarying"):
        raise ValueError(f'all_gather: to must be "varying" or "invarying", got {to!r}.')

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        return _call(_all_gather, t, axes, _check_dim("all_gather", t, dim, "dim"), to)

    return _map("all_gather", x, of_tensor)


def psum_scatter(x: Any, axis: Axis, *, dim: int = 0) -> Any:
    """Sum over the devices of an axis, of which each keeps its part along a dim.

    Args:
        x: Tensors of shape `(..., local * size of the axis, ...)`.
        axis: Name or names of axes.
        dim: The dim that is split, -1 for the last.

    Returns:
        Tensors of shape `(..., local, ...)`: the part of the sum that belongs to the device's index.
    """
    sizes = _check_axes("psum_scatter", axis)

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        return _call(_psum_scatter, t, tuple(sizes), _check_split("psum_scatter", t, dim, "dim", sizes))

    return _map("psum_scatter", x, of_tensor)


def all_to_all(x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
    """Split along one dim, send the n-th part to the n-th device of an axis, and concatenate what arrives.

    Args:
        x: Tensors of shape `(..., a * size of the axis, ..., b, ...)`, at `split_dim` and `concat_dim`.
        axis: Name or names of axes.
        split_dim: The dim to split, -1 for the last.
        concat_dim: The dim along which parts arrive, in the order of the devices that sent them.

    Returns:
        Tensors of shape `(..., a, ..., b * size of the axis, ...)`.
    """
    sizes = _check_axes("all_to_all", axis)

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        split = _check_split("all_to_all", t, split_dim, "split_dim", sizes)
        concat = _check_dim("all_to_all", t, concat_dim, "concat_dim")
        return _call(_all_to_all, t, tuple(sizes), split, concat)

    return _map("all_to_all", x, of_tensor)


def ppermute(x: Any, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send tensors from device to device along an axis.

    Args:
        x: Tensors of any shape, which stays.
        axis: Name or names of axes.
        pairs: `(source, destination)` indices along the axis. No device sends twice or receives twice; one that
            receives nothing gets zeros.
    """
    sizes = _check_axes("ppermute", axis)
    checked = _check_pairs(pairs, math.prod(sizes.values()))
    return _map("ppermute", x, lambda t: _call(_ppermute, t, tuple(sizes), checked))


def axis_index(axis: Axis) -> torch.Tensor:
    """The device's index along an axis, an int64 scalar; along several, of their product, the first slowest."""
    axes = tuple(_check_axes("axis_index", axis))
    return call_jax(lambda: lax.axis_index(axes)).long()


def axis_size(axis: Axis) -> int:
    """The number of devices along an axis; along several, their product."""
    return math.prod(_check_axes("axis_size", axis).values())


@overload
def fold_in_axis(key: torch.Tensor, axis: Axis) -> torch.Tensor: ...
@overload
def fold_in_axis(key: Axis) -> contextlib.AbstractContextManager[None]: ...
def fold_in_axis(key: Any, axis: Any = None) -> Any:
    """Random numbers that differ along an axis, and agree along all others.

    `with fold_in_axis("i"):` lets what torch draws within (`torch.rand`, dropout) differ by index along `"i"`; without
    it, all devices draw the same. `fold_in_axis(key, "i")` does it for a key.

    Args:
        key: The words of a JAX key, (2,) uint32, as `jax.random.key_data` gives them; or the axis, alone.
        axis: Name or names of axes.

    Returns:
        Another key, (2,) uint32; or a context manager.
    """
    if axis is None:
        return drawing_along(tuple(_check_axes("fold_in_axis", key)))
    axes = tuple(_check_axes("fold_in_axis", axis))
    if not isinstance(key, torch.Tensor) or key.dtype != torch.uint32 or tuple(key.shape) != (2,):
        raise TypeError(
            f"fold_in_axis: a key is the two words of a JAX key, (2,) uint32, got {_describe(key)}. "
            "Take them with jax.random.key_data(jax.random.key(seed)), or pass an axis alone."
        )
    return call_jax(lambda words: jax.random.key_data(fold_axes(wrap_seed(words), axes)), key)


# What JAX does. Axes that JAX tracks (see `_axes`) and others, of a `vmap` within, do not mix in one primitive.


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    tracked, others = _by_kind(axes)
    x = lax.psum(vary(x, tracked), tracked) if tracked else x
    return lax.psum(x, others) if others else x


def _all_gather(x: jax.Array, axes: tuple[str, ...], dim: int, to: str) -> jax.Array:
    tracked, _ = _by_kind(axes)
    x = vary(x, tracked)
    for axis in reversed(axes):
        x = lax.all_gather(x, axis, axis=dim, tiled=True, **({"to": to} if axis in tracked else {}))
    return x


def _psum_scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    x = vary(x, _by_kind(axes)[0])
    for axis in axes:
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x


def _all_to_all(x: jax.Array, axes: tuple[str, ...], split: int, concat: int) -> jax.Array:
    return lax.all_to_all(vary(x, _by_kind(axes)[0]), _one_kind("all_to_all", axes), split, concat, tiled=True)


def _ppermute(x: jax.Array, axes: tuple[str, ...], pairs: list[tuple[int, int]]) -> jax.Array:
    return lax.ppermute(vary(x, _by_kind(axes)[0]), _one_kind("ppermute", axes), pairs)


def _extreme(name: str, x: Any, axis: Axis, reduce: Callable[..., jax.Array]) -> Any:
    axes = tuple(_check_axes(name, axis))

    def plain(a: jax.Array) -> jax.Array:
        tracked, others = _by_kind(axes)
        a = reduce(vary(a, tracked), tracked) if tracked else a
        return reduce(a, others) if others else a

    smooth = jax.custom_jvp(plain)

    @smooth.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        (a,), (tangent,) = primals, tangents
        best = plain(a)
        holds = a == best
        share = jnp.where(holds, tangent, 0) / _psum(holds.astype(a.dtype), axes)
        return best, _psum(share, axes)

    def of_tensor(t: torch.Tensor) -> torch.Tensor:
        if t.is_complex():
            raise TypeError(f"{name}: complex numbers have no order, got {_describe(t)}.")
        if t.dtype == torch.bool:
            return of_tensor(t.int()).bool()
        return _call(smooth if t.is_floating_point() else plain, t)

    return _map(name, x, of_tensor, of_number=lambda n: n)


def _by_kind(axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that JAX tracks, and the others."""
    known = tracked_axes()
    others = tuple(a for a in axes if a not in known)
    if known and others:
        raise NotImplementedError(
            f"{others[0]!r} is the axis_name of a jax_vmap, along which JAX cannot communicate within jax_shard_map "
            "while it tracks what varies. Give jax_shard_map check_vma=False, or reduce the dim without jax_vmap."
        )
    return tuple(a for a in axes if a in known), others


def _one_kind(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    if all(_by_kind(axes)):
        raise NotImplementedError(
            f"{name}: {' and '.join(map(repr, axes))} are bound by different transforms. Use one after the other."
        )
    return axes


def _call(fn: Callable[..., jax.Array], t: torch.Tensor, *args: Any) -> torch.Tensor:
    dtype = torch.int64 if t.dtype == torch.bool and fn in (_psum, _psum_scatter) else t.dtype
    return call_jax(lambda a: fn(a, *args), t).to(dtype)


# Checks, before anything is traced.


def _check_axes(name: str, axis: Any) -> dict[str, int]:
    """The axes with their sizes; the capture under way depends on them."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(f'{name}: an axis is a name, as in {name}(x, "i"), or a tuple of names; got {axis!r}.')
    if len(set(axes)) < len(axes):
        raise ValueError(f"{name}: {axis!r} names an axis twice.")
    sizes = {a: size_of(a) for a in axes}
    for unbound in (a for a, size in sizes.items() if size is None):
        bound = ", ".join(map(repr, manual_axes()))
        raise NameError(
            f"{name}: axis {unbound!r} is not bound here{f' ({bound} of the mesh are)' if bound else ''}. Collectives "
            "work inside a function that is mapped over a named axis: jax_shard_map(f, mesh=...) binds the axes of its "
            f"mesh, jax_pmap(f, axis_name={unbound!r}), jax_vmap(f, axis_name={unbound!r}) and tpmap their axis_name."
        )
    watch = current_watch()
    if watch is not None:
        watch.axes.update(sizes)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return sizes  # pyright: ignore[reportReturnType]


def _map(
    name: str, x: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_number: Callable[[Any], Any] | None = None
) -> Any:
    """Apply to each tensor of a pytree."""
    adopt_torch_nodes(x)

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return of_tensor(leaf)
        if of_number is not None and isinstance(leaf, (int, float, complex)):
            return of_number(leaf)
        raise TypeError(f"{name}: expected torch tensors, or a pytree of them, got {_describe(leaf)}.")

    return jax.tree.map(of_leaf, x)


def _check_dim(name: str, t: torch.Tensor, dim: Any, argument: str) -> int:
    if type(dim) is not int or not -t.ndim <= dim < t.ndim:
        raise ValueError(f"{name}: {argument}={dim!r} is not a dim of a tensor of local shape {tuple(t.shape)}.")
    return dim % t.ndim


def _check_split(name: str, t: torch.Tensor, dim: Any, argument: str, sizes: dict[str, int]) -> int:
    dim, count = _check_dim(name, t, dim, argument), math.prod(sizes.values())
    if t.shape[dim] % count:
        shown = " * ".join(f"{a}={size}" for a, size in sizes.items())
        raise ValueError(
            f"{name}: {argument}={dim} has local size {t.shape[dim]}, which is not a multiple of {shown}"
            f"{f' = {count}' if len(sizes) > 1 else ''}. Pad it, or split another dim of {tuple(t.shape)}."
        )
    return dim


def _check_pairs(pairs: Any, count: int) -> list[tuple[int, int]]:
    checked = [tuple(pair) if isinstance(pair, (tuple, list)) else (pair,) for pair in pairs]
    if any(len(pair) != 2 or not all(type(i) is int for i in pair) for pair in checked):
        raise TypeError(f"ppermute: pairs are (source, destination) indices, got {list(pairs)}.")
    for pair in checked:
        if not all(0 <= index < count for index in pair):
            raise ValueError(f"ppermute: pair {pair} leaves the axis, whose indices are 0 to {count - 1}.")
    for role, indices in zip(("sends", "receives"), zip(*checked, strict=True), strict=False):
        doubled = sorted({i for i in indices if indices.count(i) > 1})
        if doubled:
            raise ValueError(f"ppermute: device {doubled[0]} {role} twice in {checked}; each may once.")
    return checked  # pyright: ignore[reportReturnType]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}"
