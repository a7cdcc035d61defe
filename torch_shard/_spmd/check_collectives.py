"""Checks of what collectives take where JAX would go on: axes, tensors, dims and pairs."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import torch

from torch_shard._capture import current_mode
from torch_shard._common.axes import manual_axes, size_of
from torch_shard._common.caller import caller
from torch_shard._common.convert import adopt_torch_nodes
from torch_shard._common.types import PyTree

T = TypeVar("T")


def sizes_of(axis: Any) -> dict[str, int]:
    """The axes with their sizes; the capture under way depends on them."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{caller()}: {axis!r} names an axis twice.")
    sizes: dict[str, Any] = {name: size_of(name) for name in axes}
    for unbound, size in sizes.items():
        if size is not None:
            continue
        # JAX gives an axis that `pmap` leaves unnamed a name with an underscore.
        bound = ", ".join(repr(name) for name in manual_axes() if not name.startswith("_"))
        others = f" ({bound} of the mesh are)" if bound else ""
        raise NameError(
            f"{caller()}: axis {unbound!r} is not bound here{others}. "
            "Collectives work inside a function that is mapped over a named axis: jax_shard_map(f, mesh=...) binds the "
            f"axes of its mesh, jax_pmap(f, axis_name={unbound!r}), jax_vmap(f, axis_name={unbound!r}) and tpmap their "
            "axis_name."
        )
    capture_mode = current_mode()
    if capture_mode is not None:
        capture_mode.axes.update(sizes)
    return sizes


def map_tensors(
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
        raise TypeError(f"{caller()}: expected torch tensors, or a pytree of them, got {type(leaf).__name__}.")

    return jax.tree.map(of_leaf, x)


def check_dim(t: torch.Tensor, dim: int) -> int:
    """The dim, counted from the first; torch refuses one that the tensor lacks."""
    t.size(dim)
    return dim % t.ndim


def check_split(t: torch.Tensor, dim: int, sizes: dict[str, int]) -> int:
    """The dim, counted from the first; refuses one that the axes do not divide."""
    if t.size(dim) % math.prod(sizes.values()):
        raise ValueError(
            f"{caller()}: dim {dim} of local shape {tuple(t.shape)} is not a multiple of the axes {sizes}."
        )
    return check_dim(t, dim)


def check_pairs(pairs: Iterable[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The pairs; refuses those that leave the axis, of which JAX takes negative ones, and twins, which `vmap` takes."""
    checked = list(pairs)
    for ends in zip(*checked, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= index < count for index in ends):
            raise ValueError(
                f"{caller()}: sources and destinations must be unique, of 0 to {count - 1}, got {checked}."
            )
    return checked
