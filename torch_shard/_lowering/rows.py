"""Values that have the rows of the batch stay split as the batch is, where the compiler would choose otherwise.

Where parameters are split over the axes of the batch too (FSDP), XLA's partitioner may split the hidden dims of
activations over these axes and sum the results over the devices, with the whole batch on each. A constraint on the
rows, which leaves all other dims to the partitioner, keeps it from that; it changes no number.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.fx import Node

from torch_shard._common.axes import manual_axes
from torch_shard._common.fx import aten_name, operator_name, shape_of
from torch_shard._common.operator_families import PRODUCTS, RESHAPES
from torch_shard._common.types import PyTree
from torch_shard._sharding import Context, has_three_axes

Results = tuple[jax.Array, ...]

ROWS = "rows"
"""Under this name the metadata of a node say which dim of its value has the rows of the batch."""

SEQUENCE = "sequence"
"""Under this name they say which dim has the sequence of the batch, where a plan splits it over an axis of its own."""

USED_AS = "used_as"
"""Under this name those of an input say how an entry is split in use, if that is less than in store."""

_KEPT = PRODUCTS | {"embedding", "add", "constrained"}
"""What a constraint has moved comes back: XLA's partitioner errs in products of factors with rows in other places."""


_CUTS = {"slice": 1, "split": 2, "split_with_sizes": 2}
"""Where operators that cut a value have the dim among their arguments."""


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
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

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
        found: tuple[str, ...] = ()
        for axis in (*self.axes, *(axis for axis in self.sizes if axis not in self.axes)):
            if num_rows % (self.mesh.shape[axis] * math.prod(self.mesh.shape[a] for a in found)) == 0:
                found = (*found, axis)
        return found

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    def sharding(self, dim: int, ndim: int) -> NamedSharding:
        """That of a value which has the rows along one of its dims: the compiler chooses for the others."""
        return self.along({dim: self.axes}, ndim)

    def along(self, axes: Mapping[int, tuple[str, ...]], ndim: int) -> NamedSharding:
        """That of a value whose dims are split over these axes: the compiler chooses for the others."""
        return NamedSharding(
            self.mesh, PartitionSpec(*(axes.get(dim, PartitionSpec.UNCONSTRAINED) for dim in range(ndim)))
        )

    def places(
        self, row_dim: int | None, sequence_dim: int | None, shape: tuple[int, ...]
    ) -> dict[int, tuple[str, ...]]:
        """The axes of the dims of a value that has rows and a sequence there, where they divide."""
        found: dict[int, tuple[str, ...]] = {}
        of_sequence = (self.context.axis,) if self.context else ()
        for dim, axes in ((row_dim, self.axes), (sequence_dim, of_sequence)):
            if dim is not None and axes:
                both = (*found.get(dim, ()), *axes)
                found |= {dim: both} if shape[dim] % self.size_of(both) == 0 else {}
        return found


_CURRENT: contextvars.ContextVar[RowSplit | None] = contextvars.ContextVar("rows", default=None)


def current_rows() -> RowSplit | None:
    """How the rows lie in the program that is being traced; None where that is not known."""
    return _CURRENT.get()


@contextlib.contextmanager
def rows_split(split: RowSplit | None) -> Iterator[None]:
    """Let programs that are traced within know how the rows of the batch lie."""
    token = _CURRENT.set(split)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def on_rows(
    fn: Callable[..., tuple[Results, Results]],
    by_rows: Sequence[PyTree],
    whole: Sequence[PyTree],
    *,
    dims: Sequence[int] = (),
    out_dims: Sequence[int] = (),
) -> tuple[Results, Results]:
    """Run a function on each device for its rows, without the partitioner; as it is where no rows are known.

    Args:
        fn: `(*by_rows, *whole) -> (results with rows, results that are sums over rows)`.
        by_rows: Arguments whose arrays have rows.
        whole: Those whose arrays each device needs whole.
        dims: The dim of the rows in each argument that has some; 0 by default.
        out_dims: The dim of the rows in each result that has some; 0 by default.
    """
    split = current_rows()
    if split is None or split.mesh.size == 1 or manual_axes():
        return fn(*by_rows, *whole)
    dims = dims or [0] * len(by_rows)
    axes = split.dividing(by_rows[0].shape[dims[0]])

    def local(*args: PyTree) -> tuple[Results, Results]:
        own, sums = fn(*args)
        return own, jax.lax.psum(sums, axes) if axes else sums

    def along(dim: int) -> PartitionSpec:
        return PartitionSpec(*[None] * dim, axes)

    in_specs = (*map(along, dims), *(PartitionSpec() for _ in whole))
    out_specs = (tuple(map(along, out_dims)) if out_dims else along(0), PartitionSpec())
    mapped = jax.shard_map(local, mesh=split.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(*by_rows, *whole)


def as_used(value: PyTree, spec: PartitionSpec | None) -> PyTree:
    """An entry of the model, split like this where it is used; as it is where nothing is said."""
    split = current_rows()
    if split is None or spec is None:
        return value
    return jax.lax.with_sharding_constraint(value, NamedSharding(split.mesh, spec))


def whole_dims(array: jax.Array, *dims: int) -> jax.Array:
    """An array that no device has a part of these dims of; the compiler chooses for the others."""
    split = current_rows()
    if split is None or manual_axes():
        return array
    free = None if has_three_axes(split.mesh) else PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if dim in dims else free for dim in range(array.ndim)))
    return jax.lax.with_sharding_constraint(array, NamedSharding(split.mesh, spec))


def whole_if_uneven(values: Sequence[PyTree], dims: Sequence[int | None] = ()) -> Sequence[PyTree]:
    """What a scatter writes, and where; all of it on each device, if the devices do not divide the indices.

    XLA's partitioner pads them and may write the padding too (jaxlib 0.10.2; tests/system/test_upstream.py).
    """
    split = current_rows()
    if split is None or manual_axes():
        return values
    pairs = zip(values, dims or [None] * len(values), strict=True)
    indices = [(v.shape, dim) for v, dim in pairs if isinstance(v, jax.Array) and jnp.issubdtype(v.dtype, jnp.integer)]
    whole_sizes = [n for shape, dim in indices if dim is None for n in shape]
    row_sizes = [shape[dim] for shape, dim in indices if dim is not None]
    if not any(n % split.mesh.size for n in whole_sizes) and not any(n % split.num_shards for n in row_sizes):
        return values
    whole = NamedSharding(split.mesh, PartitionSpec())
    return [jax.lax.with_sharding_constraint(v, whole) if isinstance(v, jax.Array) else v for v in values]


def whole_if_cut(node: Node, value: PyTree) -> PyTree:
    """What an operator cuts along its last dim into parts that shards do not line up with, with that dim whole.

    XLA's partitioner moves parts of shards for it, and errs where the result moves on (jaxlib 0.10.2; validation/fuzz).
    """
    split = current_rows()
    if split is None or not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    sizes = [split.mesh.shape[axis] for axis in split.other_axes]
    num = _num_parts(node, value.shape)
    return whole_dims(value, value.ndim - 1) if any(num % size for size in sizes) else value


def _num_parts(node: Node, shape: tuple[int, ...]) -> int:
    """Into how many parts the last dim of a source is cut: 0 if it is not, 1 if not into equal ones."""
    if node.target in RESHAPES:
        before, after = math.prod(shape[:-1]), shape_of(node)
        at = next((i for i in range(len(after)) if math.prod(after[:i]) == before and after[i] > 1), None)
        return 0 if at is None or after[at] >= shape[-1] else after[at]
    place = _CUTS.get(aten_name(node))
    if place is None:
        return 0
    dim = node.kwargs.get("dim", dict(enumerate(node.args)).get(place, 0))
    return int(isinstance(dim, int) and dim in (-1, len(shape) - 1))


def keep_rows(node: Node, value: PyTree) -> PyTree:
    """The value of a node, with its rows split over the devices where that is asked for."""
    split = _CURRENT.get()
    if split is None or not split.kept or operator_name(node) not in _KEPT:
        return value
    axes = split.places(node.meta.get(ROWS), node.meta.get(SEQUENCE), value.shape)
    if not axes:
        return value
    return jax.lax.with_sharding_constraint(value, split.along(axes, value.ndim))
