"""Do specs fit the arguments? Said by the names of the arguments, before the user's code is traced."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from torch_shard._common.axes import manual_axes, varying
from torch_shard._sharding.mesh import describe_mesh, describe_spec, find_spec_faults


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
        named = ", ".join(repr(axis) for axis in outer if not axis.startswith("_")) or "devices"
        raise ValueError(
            f"jax_shard_map: here {named} are mapped already, by a map around this one. A map "
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


def _raise_all(heading: str, faults: list[str]) -> None:
    if faults:
        raise ValueError(f"{heading}:\n\n" + "\n".join(f"  {fault}" for fault in faults))
