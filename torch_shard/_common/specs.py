"""What specs and meshes say of themselves: the axes that they name, how they are written, where slices lie."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec


def axes_of(spec: Iterable[str | tuple[str, ...] | None]) -> list[str]:
    """List the axes that a spec, or some entries of one, name."""
    axes: list[str] = []
    for part in spec:
        if isinstance(part, tuple):
            axes += part
        elif part is not None:
            axes.append(part)
    return axes


def has_three_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has three axes or more, where XLA's partitioner errs in more layouts."""
    return sum(size > 1 for size in mesh.shape.values()) >= 3


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Write a mesh's axes and sizes for tables and errors, as in `(batch=4, model=2)`."""
    return f"({describe_sizes(mesh.shape)})"


def describe_spec(spec: PartitionSpec) -> str:
    """Write a spec as one types it: `P('model')`, where JAX's own repr is `P('model',)`."""
    return f"P({', '.join(map(repr, spec))})"


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Write axes with their sizes, as in `batch=4, model=2`."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def slices_of(mesh: Mesh) -> list[int]:
    """In which TPU slice each device lies, in the mesh's order; other devices are all in one."""
    return list(map(slice_of, mesh.devices.flat))


def slice_of(device: Any) -> int:
    """In which TPU slice a device lies."""
    # JAX gives GPUs a slice index too, which is the number of their host.
    if device.platform != "tpu":
        return 0
    return int(getattr(device, "slice_index", 0) or 0)
