"""Meshes with named Auto axes, and how tensors lie on them."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import collections
import contextlib
import contextvars
import difflib
import logging
import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from torch_shard._common.caller import caller, public
from torch_shard._common.specs import axes_of, describe_mesh, describe_sizes, describe_spec, slice_of
from torch_shard._common.types import Device
from torch_shard._hosts import check_started
from torch_shard._sharding.topology import is_compile_only, topology_devices

logger = logging.getLogger(__name__)


@public
def make_mesh(
    devices: Sequence[Device] | None = None,
    *,
    topology: str | None = None,
    num_slices: int | None = None,
    **axis_sizes: int,
) -> Mesh:
    """Lay devices out as a mesh with named axes, in the order given.

    Uses the first devices, as many as the product of the sizes. The others stay idle, which a warning says where
    `devices` are not given.

    Args:
        devices: The devices to choose from. By default all that JAX sees.
        topology: Instead of devices, the name of accelerators that this machine need not have, such as `"v5e:16x16"`,
            `"v5p:8x8x8"` or `"h100:8"`: steps on such a mesh compile, and tell what they would take
            (`step.preview`, `step.lower`); nothing can be put there. Needs the extra `tpu` or `cuda`.
        num_slices: With `topology`, how many such TPU slices, which a slower network joins.
        **axis_sizes: Number of devices along each axis, by axis name (any name but those above). One of them may be -1:
            as many as the other axes leave. Where devices lie in several slices, the first axis goes from slice to
            slice, and the others stay within one.

    Returns:
        A mesh whose axes are all Auto: XLA chooses the shardings inside a step.

    Raises:
        TypeError: A size is not an int.
        ValueError: No axis, a size that is neither positive nor -1, sizes that do not fit the devices, what is no
            sequence of different devices, or no such topology; or a launcher has started several processes, and
            `initialize` was not called.
        ModuleNotFoundError: The compiler for the topology is not installed.

    Example:
        >>> dict(make_mesh(batch=4, model=2).shape)
        {'batch': 4, 'model': 2}
    """
    _check_sizes(axis_sizes)
    if devices is None and topology is None:
        topology = _TOPOLOGY.get()
    available = _available(devices, topology, num_slices)
    sizes = _fill_in(axis_sizes, len(available))
    required = math.prod(sizes)
    if required > len(available) and topology is not None:
        named = repr(topology) if num_slices is None else f"{topology!r} with num_slices={num_slices}"
        raise ValueError(
            f"make_mesh: {describe_sizes(axis_sizes)} needs {required} devices, but {named} has {len(available)}. "
            "Choose sizes whose product is at most that, or a larger topology."
        )
    if required > len(available):
        raise ValueError(
            f"make_mesh: {describe_sizes(axis_sizes)} needs {required} devices, but {len(available)} are available. "
            f"Choose sizes whose product is at most {len(available)}, or simulate devices on the CPU: "
            f'jax.config.update("jax_num_cpu_devices", {required}) before JAX starts '
            "(with JAX_PLATFORMS=cpu where JAX sees accelerators)."
        )
    if required < len(available) and devices is None and topology is None:
        logger.warning(
            "make_mesh: (%s) takes %d of the %d devices, and the others stay idle. A size of -1 takes all that are "
            "left; where so few are meant, devices=jax.devices()[:%d] says so.",
            describe_sizes(axis_sizes),
            required,
            len(available),
            required,
        )
    try:
        return _laid_out(sizes, tuple(axis_sizes), available[:required])
    except AssertionError as error:
        # JAX's own, of devices that are no box of the machine.
        raise ValueError(
            f"make_mesh: {describe_sizes(axis_sizes)} takes {required} of {len(available)} devices, which JAX cannot "
            f"lay out on such a machine. Choose sizes whose product is {len(available)}, or give devices= yourself."
        ) from error


_TOPOLOGY = contextvars.ContextVar[str | None]("topology", default=None)


@contextlib.contextmanager
def within_topology(topology: str | None) -> Generator[None, None, None]:
    """Let `make_mesh` take the devices of this topology, where it is given none: in a script that is previewed."""
    token = _TOPOLOGY.set(topology)
    try:
        yield
    finally:
        _TOPOLOGY.reset(token)


def _available(devices: object, topology: str | None, num_slices: int | None) -> list[Device]:
    if num_slices is not None and (topology is None or type(num_slices) is not int or num_slices < 1):
        raise ValueError(
            f"make_mesh: num_slices must be a positive integer beside topology=, got {num_slices!r}. Devices that a "
            "machine has say themselves in which slice they lie."
        )
    if topology is None:
        check_started()
        return list(cast(Sequence[Device], jax.devices())) if devices is None else as_devices(devices)
    if devices is not None:
        raise ValueError("make_mesh: give devices or a topology, not both.")
    return topology_devices(topology, num_slices)


def _laid_out(sizes: tuple[int, ...], names: tuple[str, ...], devices: list[Device]) -> Mesh:
    """A mesh of these sizes, neighbours of the machine along its axes as far as JAX can have that."""
    given: Any = devices
    auto = (AxisType.Auto,) * len(sizes)
    devices_by_slice = collections.Counter(map(slice_of, devices))
    num = len(devices_by_slice)
    if num > 1:
        if sizes[0] % num or len(set(devices_by_slice.values())) > 1:
            axes = describe_sizes(dict(zip(names, sizes, strict=True)))
            raise ValueError(
                f"make_mesh: {axes} takes devices of {num} slices, over which "
                f"the first axis goes: {names[0]} must be a multiple of {num}, and each slice give as many devices "
                f"(found {', '.join(map(str, devices_by_slice.values()))}). Put an axis of that size first, as in "
                f"make_mesh(replica={num}, ...)."
            )
        within = (sizes[0] // num, *sizes[1:])
        between = (num, *[1] * (len(sizes) - 1))
        grid = mesh_utils.create_hybrid_device_mesh(within, between, given, allow_split_physical_axes=True)
        return Mesh(grid, names, axis_types=auto)
    try:
        return jax.make_mesh(sizes, names, axis_types=auto, devices=given)
    except NotImplementedError:
        # An axis would run along a part of an axis of the machine, which `jax.make_mesh` does not allow.
        grid = mesh_utils.create_device_mesh(sizes, given, allow_split_physical_axes=True)
        return Mesh(grid, names, axis_types=auto)


def as_devices(devices: object) -> list[Device]:
    """The devices that a user gave: at least one, each once."""
    is_sequence = isinstance(devices, Sequence | np.ndarray)
    listed: list[Any] = list(cast(Sequence[Any], devices)) if is_sequence else [devices]
    has_others = not all(isinstance(device, jax.Device) for device in listed)
    has_twice = len(set(map(id, listed))) < len(listed)
    if not listed or has_others or has_twice:
        raise ValueError(
            f"{caller()}: devices must be a sequence of different JAX devices, as in jax.devices()[:4], "
            f"got {devices!r}."
        )
    return listed


def check_mesh(mesh: object) -> Mesh:
    """Return `mesh` as it is, or refuse it.

    Args:
        mesh: What a user gave as a mesh.

    Raises:
        TypeError: It is not a `jax.sharding.Mesh`.
        ValueError: Some axis is Explicit or Manual; or JAX has one process of several that were launched.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{caller()}: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. "
            "Build one with torch_shard.make_mesh(batch=4, model=2)."
        )
    foreign = _not_auto(mesh)
    if foreign:
        raise ValueError(_must_be_auto(mesh, "a step", foreign))
    if not is_compile_only(mesh.devices.flat[0]):
        check_started()
    return mesh


def refuse_explicit(arrays: Iterable[object], what: str) -> None:
    """Refuse arrays on a mesh whose axes are Explicit: then JAX asks each operator for the sharding of its result.

    Args:
        arrays: In a trace or not.
        what: The torch callable that takes them.
    """
    for array in arrays:
        if not isinstance(array, jax.Array):
            continue
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            explicit = [axis for axis in _not_auto(mesh) if axis.endswith(AxisType.Explicit.name)]
            raise ValueError(
                f"{_must_be_auto(mesh, what, explicit)} Or let XLA choose there alone, and say how the results lie: "
                "jax.sharding.auto_axes(ts.jax_view(fn), out_sharding=P())."
            )


def _must_be_auto(mesh: Mesh | AbstractMesh, what: str, foreign: Sequence[str]) -> str:
    return (
        f"{caller()}: every mesh axis must be Auto, so that XLA may choose the shardings inside {what}, "
        f"but {', '.join(foreign)}. jax.make_mesh gives Explicit axes by default: build the mesh with "
        f"torch_shard.make_mesh{describe_mesh(mesh)} "
        f"or pass axis_types=(AxisType.Auto,) * {len(mesh.axis_names)}."
    )


def _not_auto(mesh: Mesh | AbstractMesh) -> list[str]:
    """The axes whose shardings XLA may not choose, and what they are."""
    lines: list[str] = []
    for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            lines.append(f"{axis!r} is {kind.name}")
    return lines


def refuse_compile_only(mesh: Mesh | AbstractMesh) -> None:
    """Refuse to put anything on the devices of a topology."""
    if isinstance(mesh, Mesh) and is_compile_only(mesh.devices.flat[0]):
        raise ValueError(
            f"{caller()}: the devices of mesh {describe_mesh(mesh)} are those of make_mesh(topology=...): programs "
            "compile for them, and nothing can be put there. step.preview(batch) and step.lower(step.structs, batch) "
            "take shapes; to train, make the mesh of devices that this machine has."
        )


def check_current_mesh() -> None:
    """Refuse a mesh of `jax.set_mesh` that takes the choice of shardings from XLA."""
    mesh = jax.sharding.get_abstract_mesh()
    foreign = _not_auto(mesh)
    if foreign:
        raise ValueError(
            f"{caller()}: every axis of the mesh that is current here, by jax.set_mesh or jax.shard_map, must be Auto, "
            f"but {', '.join(foreign)}. The step has a mesh of its own: call it outside."
        )


def find_spec_faults(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> list[tuple[str, str]]:
    """Say all that keeps a tensor from being split by `spec` on `mesh`, each with its remedy.

    Args:
        spec: At most one entry per dim.
        shape: Global shape.
        mesh: The mesh that `spec` should name axes of.
    """
    shown = describe_spec(spec)
    axes = axes_of(spec)
    faults: list[tuple[str, str]] = []
    for axis in dict.fromkeys(axes):
        if axis not in mesh.shape:
            faults.append((f"{shown} names an axis that the mesh lacks", _suggest_axis(axis, mesh)))
        if axes.count(axis) > 1:
            faults.append((f"{shown} names {axis!r} more than once", "Keep one: an axis splits one dim."))
    if len(spec) > len(shape):
        fault = f"{shown} is longer than the rank, {len(spec)} > {len(shape)}"
        faults.append((fault, f"Use {describe_spec(_shorten(spec, shape, mesh))}."))
    # Sizes along axes that are missing or doubled would only repeat what is said above.
    if faults:
        return faults
    return [_indivisible(spec, shape, dim, mesh) for dim in _find_uneven(spec, shape, mesh)]


def _check_sizes(axis_sizes: dict[str, int]) -> None:
    if not axis_sizes:
        raise ValueError("make_mesh: at least one axis is required, as in make_mesh(batch=4, model=2).")
    # Not isinstance: a bool is an int to Python, but not a number of devices.
    foreign = [f"{axis}={size!r}" for axis, size in axis_sizes.items() if type(size) is not int]
    if foreign:
        raise TypeError(
            f"make_mesh: every axis size must be an int, got {', '.join(foreign)}. "
            "Each axis is a keyword: make_mesh(batch=4, model=2)."
        )
    wrong = {axis: size for axis, size in axis_sizes.items() if size < 1 and size != -1}
    if wrong:
        raise ValueError(f"make_mesh: axis sizes must be positive, or -1 for the rest, got {describe_sizes(wrong)}.")


def _fill_in(axis_sizes: dict[str, int], num_devices: int) -> tuple[int, ...]:
    """Replace a size of -1 by the number of devices that the other axes leave."""
    rest = [axis for axis, size in axis_sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"make_mesh: one axis size at most may be -1, got {' and '.join(rest)}.")
    known = math.prod(size for size in axis_sizes.values() if size != -1)
    if rest and num_devices % known:
        raise ValueError(
            f"make_mesh: {rest[0]}=-1 takes what the other axes leave, but their product {known} "
            f"does not divide the {num_devices} devices available. Change them, or give {rest[0]} a size."
        )
    return tuple(num_devices // known if size == -1 else size for size in axis_sizes.values())


def _suggest_axis(axis: object, mesh: Mesh) -> str:
    names = [str(name) for name in mesh.axis_names]
    close = difflib.get_close_matches(str(axis), names, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Its axes are {', '.join(map(repr, names))}."


def _find_uneven(spec: Iterable[str | tuple[str, ...] | None], shape: tuple[int, ...], mesh: Mesh) -> list[int]:
    """List the dims that are not a multiple of the size of their axes; an unknown axis has size 1."""
    dims: list[int] = []
    # A spec may be shorter than the shape.
    for dim, (size, part) in enumerate(zip(shape, spec, strict=False)):
        num_shards = math.prod(mesh.shape.get(axis, 1) for axis in axes_of((part,)))
        if size % num_shards:
            dims.append(dim)
    return dims


def _indivisible(spec: PartitionSpec, shape: tuple[int, ...], dim: int, mesh: Mesh) -> tuple[str, str]:
    sizes = {axis: mesh.shape[axis] for axis in axes_of((spec[dim],))}
    num_shards = math.prod(sizes.values())
    product = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
    if len(sizes) > 1:
        product += f" = {num_shards}"
    fault = f"dim {dim} = {shape[dim]} is not a multiple of {product}"

    padded = math.ceil(shape[dim] / num_shards) * num_shards
    moved = _move(spec, shape, dim, mesh)
    first = f"Use {describe_spec(moved)}, pad" if moved else "Pad"
    return fault, f"{first} dim {dim} to {padded}, or replicate it with P()."


def _move(spec: PartitionSpec, shape: tuple[int, ...], dim: int, mesh: Mesh) -> PartitionSpec | None:
    """Move the axes of `dim` to the first whole dim where that makes the spec fit."""
    parts = [*spec, *[None] * (len(shape) - len(spec))]
    for other in range(len(shape)):
        moved = [*parts]
        moved[dim], moved[other] = parts[other], parts[dim]
        if parts[other] is None and not _find_uneven(moved, shape, mesh):
            return PartitionSpec(*moved)
    return None


def _shorten(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Keep what splits a dim, as a bias keeps its weight's `model`, if that fits; else replicate."""
    parts = [part for part in spec if part is not None]
    short = PartitionSpec(*parts[: len(shape)])
    return PartitionSpec() if find_spec_faults(short, shape, mesh) else short
