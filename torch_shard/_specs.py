"""Do specs and mapped dims fit the arguments? Said by the names of the arguments, before the user's code is traced."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from torch_shard._axes import manual_axes, varying
from torch_shard._mesh import describe_mesh, describe_spec, find_spec_faults


def is_spec(value: Any) -> bool:
    """Whether it is one spec, and not a tree of them."""
    return isinstance(value, P)


def axes_of(spec: P) -> list[str]:
    """The axes that a spec names."""
    return [axis for part in spec if part is not None for axis in (part if isinstance(part, tuple) else (part,))]


def check_names(what: str, specs: Any, mesh: Mesh, axis_names: Collection[str]) -> None:
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
        raise ValueError(
            f"jax_shard_map: here {', '.join(map(repr, outer))} are mapped already, by a map around this one. A map "
            f"within needs the same mesh and other axes of it; this one has mesh {describe_mesh(mesh)} and axis_names "
            f"{tuple(axis_names) or tuple(mesh.axis_names)}. Give the outer jax_shard_map fewer axis_names."
        )


def spread_specs(what: str, specs: Any, tree: Any, names: Sequence[str] = ()) -> Any:
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


def _structure(tree: Any) -> str:
    return str(jax.tree.structure(tree, is_leaf=is_spec)).removeprefix("PyTreeDef(").removesuffix(")")


def check_inputs(specs: Any, args: Sequence[Any], names: Sequence[str], mesh: Mesh) -> None:
    """Refuse arguments that their specs do not fit."""
    faults = []
    for name, arg, arg_specs in zip(names, args, specs, strict=True):
        leaves = jax.tree_util.tree_leaves_with_path(arg)
        for (path, leaf), spec in zip(leaves, jax.tree.leaves(arg_specs, is_leaf=is_spec), strict=True):
            shape = jax.numpy.shape(leaf)
            where = f"{name}{jax.tree_util.keystr(path)} {shape}"
            faults += [f"{where}: {fault}. {remedy}" for fault, remedy in find_spec_faults(spec, shape, mesh)]
    _raise_all(f"jax_shard_map: arguments do not fit in_specs on mesh {describe_mesh(mesh)}", faults)


def check_outputs(result: Any, out_specs: Any, mesh: Mesh, axes: Collection[str]) -> None:
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


@dataclasses.dataclass(frozen=True)
class Mapped:
    """How many rows are mapped, and along which dim of each leaf of the arguments."""

    size: int
    axes: tuple[int | None, ...]


def check_mapped(
    caller: str,
    names: Sequence[str],
    args: Sequence[Any],
    axes: Sequence[Any],
    axis_size: int | None,
    *,
    static: Collection[int] = (),
    limit: int | None = None,
) -> Mapped:
    """How arguments are mapped; refuses mapped dims that are missing, differ in size, or are more than the devices.

    Args:
        caller: Begins the error.
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
            _check_hashable(caller, name, arg)
            continue
        for where, leaf, dim in _with_axes(caller, name, arg, axis):
            shape = jax.numpy.shape(leaf)
            dims.append(dim)
            if dim is None:
                continue
            if not -len(shape) <= dim < len(shape):
                raise ValueError(
                    f"{caller}: {where} has shape {shape}, and in_axes maps its dim {dim}, which it lacks."
                )
            sizes[where] = shape[dim]
    if axis_size is not None:
        sizes["axis_size"] = axis_size
    if not sizes:
        raise ValueError(f"{caller}: no argument is mapped (in_axes is None for all), so axis_size must be given.")
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{where}: {size}" for where, size in sizes.items())
        raise ValueError(f"{caller}: the mapped dims must have one size, got {shown}.")
    size = next(iter(sizes.values()))
    if limit is not None and size > limit:
        raise ValueError(
            f"{caller}: {next(iter(sizes))} has size {size} along its mapped dim, but there are {limit} devices. "
            "Use jax_vmap for some of it, or more devices."
        )
    return Mapped(size, tuple(dims))


def _with_axes(caller: str, name: str, arg: Any, axis: Any) -> Iterable[tuple[str, Any, Any]]:
    """Each leaf of an argument, with its name and mapped dim."""

    def is_axis(value: Any) -> bool:
        return value is None or isinstance(value, int)

    try:
        axes = jax.tree.leaves(jax.tree.broadcast(axis, arg, is_leaf=is_axis), is_leaf=is_axis)
    except ValueError as error:
        raise TypeError(
            f"{caller}: the in_axes of {name}, {axis!r}, must be an int or None, or have the structure of the "
            f"argument, {jax.tree.structure(arg)}."
        ) from error
    for (path, leaf), dim in zip(jax.tree_util.tree_leaves_with_path(arg), axes, strict=True):
        yield f"{name}{jax.tree_util.keystr(path)}", leaf, dim


def _check_hashable(caller: str, name: str, value: Any) -> None:
    if isinstance(value, jax.Array):
        raise TypeError(f"{caller}: the static argument {name} is a tensor. Pass a Python value, or map it.")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{caller}: the static argument {name} is a {type(value).__name__}, which is not hashable, and programs "
            "are kept by the values of static arguments. Pass a tuple, a string, a number or a frozen dataclass."
        ) from error


def _raise_all(heading: str, faults: list[str]) -> None:
    if faults:
        raise ValueError(f"{heading}:\n\n" + "\n".join(f"  {fault}" for fault in faults))
