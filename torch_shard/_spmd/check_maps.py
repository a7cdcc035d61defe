"""Do specs fit the arguments? Said by the names of the arguments, before the user's code is traced."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torch_shard._common.axes import manual_axes, varying
from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import is_integer
from torch_shard._sharding import axes_of, check_mesh, describe_mesh, describe_spec, find_spec_faults


def is_spec(value: object) -> bool:
    """Tell whether it is one spec, and not a tree of them."""
    return isinstance(value, P)


def check_names(what: str, specs: PyTree, mesh: Mesh, axis_names: Collection[str]) -> None:
    """Refuse what is no spec, and axes that the mesh lacks or that are not mapped."""
    faults = []
    unknown = [axis for axis in axis_names if axis not in mesh.shape]
    if unknown:
        raise ValueError(f"jax_shard_map: axis_names has {unknown[0]!r}, which mesh {describe_mesh(mesh)} lacks.")
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda s: is_spec(s) or s is None):
        where = f"{what}{jax.tree_util.keystr(path)}"
        if not is_spec(spec):
            raise TypeError(
                f"jax_shard_map: {where} must be a jax.sharding.PartitionSpec, got {spec!r}. P() leaves a tensor whole."
            )
        faults += [f"{where}: {f}. {remedy}" for f, remedy in find_spec_faults(spec, (0,) * len(spec), mesh)]
        for axis in axes_of(spec):
            if axis_names and axis not in axis_names:
                faults.append(f"{where}: {describe_spec(spec)} names {axis!r}, which is not among axis_names.")
    _raise_all(f"jax_shard_map: {what} on mesh {describe_mesh(mesh)}", faults)


def check_nesting(mesh: Mesh, axis_names: Collection[str]) -> None:
    """Refuse a map within another one over the same axes, or over another mesh."""
    outer = manual_axes()
    taken = [axis for axis in outer if axis in axis_names]
    if taken or set(outer) - set(mesh.shape) or set(outer) == set(mesh.shape):
        named = ", ".join(repr(axis) for axis in outer if not axis.startswith("_")) or "devices"
        raise ValueError(
            f"jax_shard_map: here {named} are mapped already, by a map around this one. A map "
            f"within needs the same mesh and other axes of it; this one has mesh {describe_mesh(mesh)} and axis_names "
            f"{tuple(axis_names) or tuple(mesh.axis_names)}. Give the outer jax_shard_map fewer axis_names."
        )


def spread_specs(what: str, specs: PyTree, tree: PyTree, names: Sequence[str] = ()) -> PyTree:
    """Specs that may stand for whole subtrees, as one for each leaf of `tree`."""
    if isinstance(specs, tuple) and names and len(specs) != len(tree):
        raise TypeError(
            f"jax_shard_map: {what} has {len(specs)} entries, and the function was called with {len(tree)} arguments "
            f"({', '.join(names)}). Give one for each, or one spec for all."
        )
    try:
        return jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        kind = "arguments" if names else "results"
        raise TypeError(
            f"jax_shard_map: {what} must have the structure of the {kind}, or a spec for a whole part of it. "
            f"{what}: {_structure(specs)}; {kind}: {_structure(tree)}."
        ) from error


def _structure(tree: PyTree) -> str:
    return str(jax.tree.structure(tree, is_leaf=is_spec)).removeprefix("PyTreeDef(").removesuffix(")")


def check_inputs(specs: PyTree, args: Sequence[PyTree], names: Sequence[str], mesh: Mesh) -> None:
    """Refuse arguments that their specs do not fit."""
    faults = []
    for name, arg, arg_specs in zip(names, args, specs, strict=True):
        leaves = jax.tree_util.tree_leaves_with_path(arg)
        for (path, leaf), spec in zip(leaves, jax.tree.leaves(arg_specs, is_leaf=is_spec), strict=True):
            shape = jax.numpy.shape(leaf)
            where = f"{name}{jax.tree_util.keystr(path)} {shape}"
            faults += [f"{where}: {fault}. {remedy}" for fault, remedy in find_spec_faults(spec, shape, mesh)]
    _raise_all(f"jax_shard_map: arguments do not fit in_specs on mesh {describe_mesh(mesh)}", faults)


def check_outputs(result: PyTree, out_specs: PyTree, mesh: Mesh, axes: Collection[str]) -> None:
    """Refuse local results that their specs do not fit, or that vary over one of these axes which their spec lacks."""
    specs = jax.tree.leaves(spread_specs("out_specs", out_specs, result), is_leaf=is_spec)
    faults = []
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(result), specs, strict=True):
        where = f"result{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array):
            faults.append(f"{where} is {leaf!r}. Return tensors.")
            continue
        shown = f"{where} of local shape {leaf.shape}"
        if len(spec) > leaf.ndim:
            faults.append(f"{shown}: {describe_spec(spec)} is longer than its rank {leaf.ndim}.")
        apart = sorted((varying(leaf) & set(axes)) - set(axes_of(spec)))
        if apart:
            over = " and ".join(map(repr, apart))
            faults.append(
                f"{shown}: {describe_spec(spec)} says that it is the same along {over}, but it may differ there. Name "
                f"the axis in the spec, or make it the same: psum, pmean, pmax, or all_gather(..., to='invarying')."
            )
    _raise_all(f"jax_shard_map: results do not fit out_specs on mesh {describe_mesh(mesh)}", faults)


def _raise_all(heading: str, faults: list[str]) -> None:
    if faults:
        raise ValueError(f"{heading}:\n\n" + "\n".join(f"  {fault}" for fault in faults))


@dataclasses.dataclass(frozen=True)
class Mapped:
    """Number of mapped rows, and the dim of each leaf of the arguments that they lie along."""

    size: int
    axes: tuple[int | None, ...]


def check_mapped(
    names: Sequence[str],
    args: Sequence[PyTree],
    axes: Sequence[PyTree],
    *,
    axis_size: int | None,
    static: Collection[int] = (),
    limit: int | None = None,
) -> Mapped:
    """Find how arguments are mapped; refuse mapped dims that are missing, differ in size, or exceed the devices.

    Args:
        names: Of the arguments.
        args: The arguments.
        axes: The mapped dim of each, as for `jax.vmap`.
        axis_size: What the size must be, if given.
        static: Positions of arguments that are hashable values.
        limit: How many devices there are.
    """
    sizes: dict[str, int] = {}
    dims: list[int | None] = []
    for position, (name, arg, axis) in enumerate(zip(names, args, axes, strict=True)):
        if position in static:
            _check_hashable(name, arg)
            continue
        check_leaves(name, arg)
        for where, leaf, dim in _with_axes(name, arg, axis):
            shape = np.shape(leaf)
            dims.append(dim)
            if dim is None:
                continue
            if not -len(shape) <= dim < len(shape):
                raise ValueError(
                    f"{caller()}: {where} has shape {shape}, and in_axes maps its dim {dim}, which it lacks."
                )
            sizes[where] = shape[dim]
    if axis_size is not None:
        sizes["axis_size"] = axis_size
    if not sizes:
        raise ValueError(f"{caller()}: no argument is mapped (in_axes is None for all), so axis_size must be given.")
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{where}: {size}" for where, size in sizes.items())
        raise ValueError(f"{caller()}: the mapped dims must have one size, got {shown}.")
    where, size = next(iter(sizes.items()))
    if limit is not None and not 0 < size <= limit:
        remedy = "Use jax_vmap for some of it, or more devices." if size else "Map one row at least."
        raise ValueError(
            f"{caller()}: {where} has size {size} along its mapped dim, but there are {limit} devices. {remedy}"
        )
    return Mapped(size, tuple(dims))


def _with_axes(name: str, arg: PyTree, axis: PyTree) -> Iterable[tuple[str, PyTree, PyTree]]:
    """Each leaf of an argument, with its name and mapped dim."""
    axes = _spread_axes(axis, arg)
    if axes is None:
        raise TypeError(
            f"{caller()}: the in_axes of {name}, {axis!r}, must be an int or None, or have the structure of the "
            f"argument, {jax.tree.structure(arg)}."
        )
    for (path, leaf), dim in zip(jax.tree_util.tree_leaves_with_path(arg), axes, strict=True):
        yield f"{name}{jax.tree_util.keystr(path)}", leaf, dim


def _spread_axes(axes: PyTree, tree: PyTree) -> list[int | None] | None:
    """An axis for each leaf of `tree`; None where they do not fit it."""
    found: list[int | None] = []
    try:
        spread = jax.tree.broadcast(axes, tree, is_leaf=lambda axis: axis is None)
    except ValueError:
        return None
    jax.tree.map(lambda leaf, axis: found.append(axis), tree, spread)
    return found


def _check_hashable(name: str, value: object) -> None:
    if isinstance(value, jax.Array):
        raise TypeError(f"{caller()}: the static argument {name} is a tensor. Pass a Python value, or map it.")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{caller()}: the static argument {name} is a {type(value).__name__}, which is not hashable, and programs "
            "are kept by the values of static arguments. Pass a tuple, a string, a number or a frozen dataclass."
        ) from error


VALUES = jax.Array | np.ndarray | np.generic | int | float | complex
"""What may be mapped: bools are ints."""


def check_leaves(name: str, arg: PyTree) -> None:
    """Refuse an argument that holds anything but tensors and numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
        if not isinstance(leaf, VALUES):
            raise TypeError(
                f"{caller()}: {name}{jax.tree_util.keystr(path)} is {leaf!r}, which is not a tensor. Let the function "
                "close over it, or bind it with functools.partial."
            )


def check_rows(result: PyTree, out_axes: PyTree) -> PyTree:
    """The result for one row, as it is; refuses what is not a tensor, and `out_axes` that do not suit it."""
    leaves = jax.tree_util.tree_leaves_with_path(result)
    axes = _spread_axes(out_axes, result)
    if axes is None:
        raise TypeError(
            f"{caller()}: out_axes {out_axes!r} must be an int or None, or have the structure of the result, "
            f"{jax.tree.structure(result)}."
        )
    for (path, leaf), dim in zip(leaves, axes, strict=True):
        where = f"{caller()}: result{jax.tree_util.keystr(path)}"
        check_result(where, leaf)
        shape = np.shape(leaf)
        if dim is not None and not -len(shape) - 1 <= dim <= len(shape):
            raise ValueError(f"{where} has shape {shape} in each row, in which out_axes cannot put a dim {dim}.")
    return result


def check_result(where: str, leaf: PyTree) -> None:
    """Refuse a leaf of a row's result that is neither a tensor nor a number."""
    if not isinstance(leaf, jax.Array | int | float | complex):
        raise ValueError(f"{where} is {leaf!r}. Return tensors, or numbers.")


def check_axes(argument: str, axes: PyTree) -> None:
    """Refuse what is not a mapped dim."""
    if not all(map(is_integer, jax.tree.leaves(axes))):
        raise TypeError(f"{caller()}: {argument} must be an int, None, or a pytree of them, got {axes!r}.")


def check_axis_name(name: object) -> None:
    """Refuse a name that collectives could not name."""
    if not isinstance(name, str):
        raise TypeError(f"{caller()}: axis_name must be a string, got {name!r}.")


def as_names(argument: str, names: object) -> tuple[str, ...]:
    """One or several names of axes."""
    found = (names,) if isinstance(names, str) else names
    if not (isinstance(found, Iterable) and all(isinstance(name, str) for name in found)):
        raise TypeError(f"{caller()}: {argument} must be a name of an axis, or a tuple of names, got {names!r}.")
    return tuple(found)


def check_outermost() -> None:
    """Refuse a map over devices of its own within another map over devices."""
    if manual_axes():
        raise ValueError(
            f"{caller()}: a map around this one runs on several devices already, and each of them is one device to "
            "what is within. Use jax_vmap within, or one jax_shard_map over a mesh with an axis for each."
        )


def check_places(names: Sequence[str], args: Sequence[PyTree], mesh: Mesh) -> None:
    """Refuse arguments that are committed to other devices than the mesh has, or in another order."""
    wanted = [device.id for device in mesh.devices.flat]
    for name, arg in zip(names, args, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            if not _is_committed(leaf):
                continue
            where = f"{name}{jax.tree_util.keystr(path)}"
            found = sorted(device.id for device in leaf.sharding.device_set)
            if isinstance(leaf.sharding, NamedSharding):
                check_mesh(leaf.sharding.mesh, where=f"{where}: ")
                found = [device.id for device in leaf.sharding.mesh.devices.flat]  # pyright: ignore[reportOptionalMemberAccess]
            if found != wanted and (len(found) != len(wanted) or isinstance(leaf.sharding, NamedSharding)):
                raise ValueError(
                    f"{caller()}: {where} {leaf.shape} lies on devices {found}, and the function runs on devices "
                    f"{wanted}, in that order. Make both of one mesh, or bring the argument back with "
                    "tensor.cpu() before."
                )


def _is_committed(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
