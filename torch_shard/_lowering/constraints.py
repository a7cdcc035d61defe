"""How values lie on the mesh: what a program constrains before an operator and after it, and why.

It is decided of a node by its shapes, and by what is known of its dims, before JAX is there. The rules for any operator
are here, those of a single one beside its lowering. None changes a number.

Where parameters are split over the axes of the batch too (FSDP), XLA's partitioner may split the hidden dims of
activations over these axes and sum the results over the devices, with the whole batch on each. A constraint on the
rows, which leaves all other dims to the partitioner, keeps it from that.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.fx import Node

from torch_shard._common.fx import (
    PRODUCTS,
    RESHAPES,
    SCATTERS,
    args_of,
    aten_name,
    operator_name,
    shape_of,
    sources_of,
    target_of,
)
from torch_shard._common.specs import has_three_axes
from torch_shard._common.types import Operator, PyTree
from torch_shard._lowering.rows import RowSplit, is_uneven
from torch_shard._sharding import constrain_in_steps

DIMS = "dims"
"""Under this name the metadata of a node say which dim of its value has the rows of the batch, and the sequence."""

ROWS, SEQUENCE = "rows", "sequence"

USED_AS = "used_as"
"""Under this name those of an input say how an entry is split in use, if that is less than in store."""

_KEPT = PRODUCTS | {"embedding", "add", "constrained"}
"""What a constraint has moved comes back: XLA's partitioner errs in products of factors with rows in other places."""

_CUTS = {"slice": 1, "split": 2, "split_with_sizes": 2}
"""Where operators that cut a value have the dim among their arguments."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """How one value is to lie.

    Attributes:
        spec: `PartitionSpec.UNCONSTRAINED` leaves a dim to the compiler.
        why: In a few words.
        in_steps: Whether a dim that is split over several axes gets there by way of one of them.
    """

    spec: PartitionSpec
    why: str
    in_steps: bool = False

    def put(self, value: PyTree, split: RowSplit) -> PyTree:
        """The value, laid out so."""
        sharding = NamedSharding(split.mesh, self.spec)
        if self.in_steps:
            return constrain_in_steps(value, sharding, split.data_axes)
        return jax.lax.with_sharding_constraint(value, sharding)


RESULT = -1
"""The place of a node's result, beside the numbers of its sources."""

Placed = Iterator[tuple[int, Constraint]]
"""Constraints with their places: of a source, by its number, or of the result."""

Rule = Callable[[Node, RowSplit], Placed]
R = TypeVar("R", bound=Rule)

_OF_OPERATORS: dict[Operator, Rule] = {}


def lies(*ops: Operator) -> Callable[[R], R]:
    """Register a rule for how the sources and the results of operators lie: it gives places with constraints."""

    def register(rule: R) -> R:
        _OF_OPERATORS.update(dict.fromkeys(ops, rule))
        return rule

    return register


def constraints_of(node: Node, split: RowSplit | None) -> Mapping[int, Sequence[Constraint]]:
    """What is constrained of the sources of a node, by their numbers, and of its result, in order."""
    constraints: dict[int, list[Constraint]] = {}
    if split is None or node.op != "call_function":
        return constraints

    of_operator = _OF_OPERATORS.get(target_of(node))
    rules = [_in_use, _scattered, _cut, *([of_operator] if of_operator else []), _with_rows]
    for rule in rules:
        for place, constraint in rule(node, split):
            constraints.setdefault(place, []).append(constraint)
    return constraints


def laid(value: PyTree, constraints: Sequence[Constraint], split: RowSplit | None) -> PyTree:
    """A value with its constraints, one after another."""
    for constraint in constraints:
        assert split is not None
        value = constraint.put(value, split)
    return value


def dim_of(node: Node, what: str) -> int | None:
    """The dim of a value that has the rows, or the sequence."""
    return node.meta.get(DIMS, {}).get(what)


def whole_along(node: Node, dims: Sequence[int], split: RowSplit, why: str) -> Constraint:
    """No device has a part of these dims of a value; the compiler chooses for the others."""
    # On three axes XLA's partitioner errs in what it chooses itself, too (validation/fuzz).
    free = None if has_three_axes(split.mesh) else PartitionSpec.UNCONSTRAINED
    ndim = len(shape_of(node))
    parts = [None if dim in dims else free for dim in range(ndim)]
    return Constraint(PartitionSpec(*parts), why)


def _in_use(node: Node, split: RowSplit) -> Placed:
    for place, source in enumerate(sources_of(node)):
        spec = source.meta.get(USED_AS)
        if spec is not None:
            yield place, Constraint(spec, "an entry, split in use over fewer axes than in store")


def _scattered(node: Node, split: RowSplit) -> Placed:
    """What a scatter writes, and where; all of it on each device, if the devices do not divide the indices."""
    if aten_name(node) not in SCATTERS:
        return
    # The first source is what is written to, but of bincount, which makes that itself.
    first = 0 if aten_name(node) == "bincount" else 1
    places: list[int] = []
    indices: list[tuple[tuple[int, ...], int | None]] = []
    for place, source in enumerate(sources_of(node)):
        if place < first or not _is_tensor(source):
            continue
        places.append(place)
        if _is_integer(source):
            indices.append((shape_of(source), dim_of(source, ROWS)))

    if is_uneven(indices, split):
        for place in places:
            yield place, Constraint(PartitionSpec(), "XLA errs: a scatter whose indices do not divide")


def _cut(node: Node, split: RowSplit) -> Placed:
    """What an operator cuts along its last dim into parts that shards do not line up with, with that dim whole.

    XLA's partitioner moves parts of shards for it, and errs where the result moves on (jaxlib 0.10.2; validation/fuzz).
    """
    sizes = [split.mesh.shape[axis] for axis in split.other_axes]
    why = "XLA errs: cut into parts that shards do not line up with"
    for place, source in enumerate(sources_of(node)):
        if not _is_tensor(source) or not source.meta["val"].is_floating_point():
            continue
        shape = shape_of(source)
        if not shape:
            continue
        num_parts = _num_parts(node, shape)
        if any(num_parts % size for size in sizes):
            last_dim = len(shape) - 1
            yield place, whole_along(source, [last_dim], split, why)


def _num_parts(node: Node, shape: tuple[int, ...]) -> int:
    """Into how many parts the last dim of a source is cut: 0 if it is not, 1 if not into equal ones."""
    if node.target in RESHAPES:
        # The dim of the result at which the elements of the last dim begin.
        num_before = math.prod(shape[:-1])
        new_shape = shape_of(node)
        for dim, size in enumerate(new_shape):
            if math.prod(new_shape[:dim]) == num_before and size > 1:
                return size if size < shape[-1] else 0
        return 0

    place = _CUTS.get(aten_name(node))
    if place is None:
        return 0
    args = args_of(node)
    dim = node.kwargs.get("dim", args[place] if place < len(args) else 0)
    return int(isinstance(dim, int) and dim in (-1, len(shape) - 1))


def _with_rows(node: Node, split: RowSplit) -> Placed:
    """The rows stay split over the devices, where that is asked for."""
    if not split.kept or operator_name(node) not in _KEPT:
        return
    shape = shape_of(node)
    axes = split.places(dim_of(node, ROWS), dim_of(node, SEQUENCE), shape)
    if axes:
        yield RESULT, Constraint(split.along(axes, len(shape)).spec, "rows stay split")


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_integer(node: Node) -> bool:
    dtype = node.meta["val"].dtype
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
