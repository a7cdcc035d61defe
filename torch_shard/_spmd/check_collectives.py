"""Checks of what collectives take, before anything is traced: named axes, tensors, dims and pairs."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import torch

from torch_shard._capture import current_mode
from torch_shard._common.axes import manual_axes, size_of
from torch_shard._common.convert import adopt_torch_nodes
from torch_shard._common.types import PyTree
from torch_shard._common.validate import is_integer

T = TypeVar("T")


def sizes_of(name: str, axis: object) -> dict[str, int]:
    """The axes with their sizes; the capture under way depends on them."""
    axes: tuple[Any, ...] = axis if isinstance(axis, tuple) else (axis,)
    if not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(f'{name}: an axis is a name, such as "i", or a tuple of names; got {axis!r}.')
    if len(set(axes)) < len(axes):
        raise ValueError(f"{name}: {axis!r} names an axis twice.")
    sizes = {a: size_of(a) for a in axes}
    for unbound in (a for a, size in sizes.items() if size is None):
        bound = ", ".join(repr(a) for a in manual_axes() if not a.startswith("_"))  # JAX names what pmap leaves unnamed
        raise NameError(
            f"{name}: axis {unbound!r} is not bound here{f' ({bound} of the mesh are)' if bound else ''}. Collectives "
            "work inside a function that is mapped over a named axis: jax_shard_map(f, mesh=...) binds the axes of its "
            f"mesh, jax_pmap(f, axis_name={unbound!r}), jax_vmap(f, axis_name={unbound!r}) and tpmap their axis_name."
        )
    capture_mode = current_mode()
    if capture_mode is not None:
        capture_mode.axes.update(sizes)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return sizes  # pyright: ignore[reportReturnType]


def map_tensors(
    name: str,
    x: T,
    of_tensor: Callable[[torch.Tensor], torch.Tensor],
    of_number: Callable[[complex], complex] | None = None,
) -> T:
    """Apply to each tensor of a pytree."""
    adopt_torch_nodes(x)

    def of_leaf(leaf: PyTree) -> PyTree:
        if isinstance(leaf, torch.Tensor):
            return of_tensor(leaf)
        if of_number is not None and isinstance(leaf, (int, float, complex)):
            return of_number(leaf)
        raise TypeError(f"{name}: expected torch tensors, or a pytree of them, got {describe(leaf)}.")

    return jax.tree.map(of_leaf, x)


def check_dim(name: str, t: torch.Tensor, dim: object, argument: str, *, more: int = 0) -> int:
    """The dim, counted from the first; refuses one that the tensor lacks, with so many dims more."""
    ndim = t.ndim + more
    if type(dim) is not int or not -ndim <= dim < ndim:
        raise ValueError(f"{name}: {argument}={dim!r} is not a dim of a tensor of local shape {tuple(t.shape)}.")
    return dim % ndim


def check_split(name: str, t: torch.Tensor, dim: object, argument: str, *, sizes: dict[str, int]) -> int:
    """The dim, counted from the first; refuses one that the axes do not divide."""
    dim, count = check_dim(name, t, dim, argument), math.prod(sizes.values())
    if t.shape[dim] % count:
        shown = " * ".join(f"{a}={size}" for a, size in sizes.items())
        raise ValueError(
            f"{name}: {argument}={dim} has local size {t.shape[dim]}, which is not a multiple of {shown}"
            f"{f' = {count}' if len(sizes) > 1 else ''}. Pad it, or split another dim of {tuple(t.shape)}."
        )
    return dim


def check_pairs(pairs: object, count: int) -> list[tuple[int, int]]:
    """The pairs as they are; refuses those that leave the axis, and a device that sends or receives twice."""
    given = list(pairs) if isinstance(pairs, Iterable) else pairs
    if not (isinstance(given, list) and all(map(_is_pair, given))):
        raise TypeError(f"ppermute: pairs are (source, destination) indices, got {given}.")
    checked = [(int(source), int(destination)) for source, destination in given]
    for pair in checked:
        if not all(0 <= index < count for index in pair):
            raise ValueError(f"ppermute: pair {pair} leaves the axis, whose indices are 0 to {count - 1}.")
    for role, indices in zip(("sends", "receives"), zip(*checked, strict=True), strict=False):
        doubled = sorted({i for i in indices if indices.count(i) > 1})
        if doubled:
            raise ValueError(f"ppermute: device {doubled[0]} {role} twice in {checked}; each may once.")
    return checked


def _is_pair(pair: object) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_integer, pair))


def describe(value: object) -> str:
    """Shape and dtype of a tensor, the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}"
