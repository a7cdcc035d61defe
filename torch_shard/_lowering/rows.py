"""How the rows of a batch lie on a mesh, and what runs on each device for its own."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_shard._common.types import PyTree
from torch_shard._sharding import Context

Results = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """How the rows of a batch lie on a mesh.

    Attributes:
        mesh: All devices of the step.
        axes: Those over which the rows are split.
        kept: Whether values are to keep their rows split so, where the compiler might choose otherwise.
        context: Over which other axis the sequence is split.
        experts: The axes over which the plan splits the experts of its mixtures, in the order of their spec.
        stage: The axis of a pipeline: within a stage there is no other.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    kept: bool = True
    context: Context | None = None
    experts: tuple[str, ...] = ()
    stage: str | None = None

    @property
    def num_shards(self) -> int:
        """Number of parts."""
        return self.size_of(self.axes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Those of the rows, and that of the sequence."""
        return (*self.axes, *((self.context.axis,) if self.context else ()))

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Those over which features are split."""
        return tuple(axis for axis in self.sizes if axis not in self.data_axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes that values may be split over."""
        return {axis: size for axis, size in self.mesh.shape.items() if axis != self.stage or axis in self.axes}

    def size_of(self, axes: Sequence[str]) -> int:
        """Number of parts that these axes split into."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def dividing(self, num_rows: int) -> tuple[str, ...]:
        """The axes over which so many rows divide: those of the batch first, then others, for as many as there are."""
        other_axes = [axis for axis in self.sizes if axis not in self.axes]
        chosen: tuple[str, ...] = ()
        for axis in (*self.axes, *other_axes):
            if num_rows % self.size_of((*chosen, axis)) == 0:
                chosen = (*chosen, axis)
        return chosen

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    def along(self, axes: Mapping[int, tuple[str, ...]], ndim: int) -> NamedSharding:
        """That of a value whose dims are split over these axes: the compiler chooses for the others."""
        parts = [axes.get(dim, PartitionSpec.UNCONSTRAINED) for dim in range(ndim)]
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def places(
        self, row_dim: int | None, sequence_dim: int | None, shape: tuple[int, ...]
    ) -> dict[int, tuple[str, ...]]:
        """The axes of the dims of a value that has rows and a sequence there, where they divide."""
        axes_of_dims: dict[int, tuple[str, ...]] = {}
        sequence_axes = (self.context.axis,) if self.context else ()
        for dim, axes in ((row_dim, self.axes), (sequence_dim, sequence_axes)):
            if dim is None or not axes:
                continue
            # Rows and sequence may be one dim, after a reshape.
            all_axes = (*axes_of_dims.get(dim, ()), *axes)
            if shape[dim] % self.size_of(all_axes) == 0:
                axes_of_dims[dim] = all_axes
        return axes_of_dims


def on_rows(
    fn: Callable[..., tuple[Results, Results]],
    by_rows: Sequence[PyTree],
    whole: Sequence[PyTree],
    split: RowSplit | None,
    *,
    dims: Sequence[int] = (),
    out_dims: Sequence[int] = (),
) -> tuple[Results, Results]:
    """Run a function on each device for its rows, without the partitioner; as it is where no rows are known.

    Args:
        fn: `(*by_rows, *whole) -> (results with rows, results that are sums over rows)`.
        by_rows: Arguments whose arrays have rows.
        whole: Those whose arrays each device needs whole.
        split: How the rows lie; None where that is not known.
        dims: The dim of the rows in each argument that has some; 0 by default.
        out_dims: The dim of the rows in each result that has some; 0 by default.
    """
    if split is None or split.mesh.size == 1:
        return fn(*by_rows, *whole)
    dims = dims or [0] * len(by_rows)
    axes = split.dividing(by_rows[0].shape[dims[0]])

    def local(*args: PyTree) -> tuple[Results, Results]:
        row_results, sums = fn(*args)
        if axes:
            sums = jax.lax.psum(sums, axes)
        return row_results, sums

    def along(dim: int) -> PartitionSpec:
        return PartitionSpec(*[None] * dim, axes)

    in_specs = (*map(along, dims), *[PartitionSpec()] * len(whole))
    row_specs = tuple(map(along, out_dims)) if out_dims else along(0)
    out_specs = (row_specs, PartitionSpec())
    mapped = jax.shard_map(local, mesh=split.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(*by_rows, *whole)


def is_uneven(indices: Sequence[tuple[tuple[int, ...], int | None]], split: RowSplit) -> bool:
    """Tell whether the devices do not divide the indices of a scatter, given their shapes, and dims of rows."""
    for shape, row_dim in indices:
        if row_dim is not None:
            if shape[row_dim] % split.num_shards:
                return True
        elif any(size % split.mesh.size for size in shape):
            return True
    return False


def whole_if_uneven(values: Sequence[jax.Array], split: RowSplit | None) -> Sequence[jax.Array]:
    """What an operator scatters, and where; all of it on each device, if the devices do not divide the indices.

    XLA's partitioner pads them and may write the padding too (jaxlib 0.10.2; tests/system/test_upstream.py).
    """
    indices = [(value.shape, None) for value in values if jnp.issubdtype(value.dtype, jnp.integer)]
    if split is None or not is_uneven(indices, split):
        return values
    replicated = NamedSharding(split.mesh, PartitionSpec())
    return [jax.lax.with_sharding_constraint(value, replicated) for value in values]
