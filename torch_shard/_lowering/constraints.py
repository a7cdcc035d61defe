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
from torch_shard._common.types import Operator, PyTree
from torch_shard._lowering.rows import RowSplit, is_uneven
from torch_shard._sharding import constrain_in_steps, has_three_axes

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

Found = Iterator[tuple[int, Constraint]]
Rule = Callable[[Node, RowSplit], Found]
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
    found: dict[int, list[Constraint]] = {}
    if split is not None and node.op == "call_function":
        for rule in (_in_use, _scattered, _cut, _OF_OPERATORS.get(target_of(node), _nothing), _with_rows):
            for at, constraint in rule(node, split):
                found.setdefault(at, []).append(constraint)
    return found


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
    free = None if has_three_axes(split.mesh) else PartitionSpec.UNCONSTRAINED
    return Constraint(PartitionSpec(*(None if dim in dims else free for dim in range(len(shape_of(node))))), why)


def _nothing(node: Node, split: RowSplit) -> Found:
    yield from ()


def _in_use(node: Node, split: RowSplit) -> Found:
    for at, source in enumerate(sources_of(node)):
        if (spec := source.meta.get(USED_AS)) is not None:
            yield at, Constraint(spec, "an entry, split in use over fewer axes than in store")


def _scattered(node: Node, split: RowSplit) -> Found:
    """What a scatter writes, and where; all of it on each device, if the devices do not divide the indices."""
    if aten_name(node) not in SCATTERS:
        return
    first = int(aten_name(node) != "bincount")
    given = [(at, source) for at, source in enumerate(sources_of(node)) if at >= first and _is_tensor(source)]
    indices = [(shape_of(source), dim_of(source, ROWS)) for _, source in given if _is_integer(source)]
    if is_uneven(indices, split):
        for at, _ in given:
            yield at, Constraint(PartitionSpec(), "XLA errs: a scatter whose indices do not divide")


def _cut(node: Node, split: RowSplit) -> Found:
    """What an operator cuts along its last dim into parts that shards do not line up with, with that dim whole.

    XLA's partitioner moves parts of shards for it, and errs where the result moves on (jaxlib 0.10.2; validation/fuzz).
    """
    sizes = [split.mesh.shape[axis] for axis in split.other_axes]
    for at, source in enumerate(sources_of(node)):
        if _is_tensor(source) and source.meta["val"].is_floating_point() and shape_of(source):
            num = _num_parts(node, shape_of(source))
            if any(num % size for size in sizes):
                last = len(shape_of(source)) - 1
                yield at, whole_along(source, [last], split, "XLA errs: cut into parts that shards do not line up with")


def _num_parts(node: Node, shape: tuple[int, ...]) -> int:
    """Into how many parts the last dim of a source is cut: 0 if it is not, 1 if not into equal ones."""
    if node.target in RESHAPES:
        before, after = math.prod(shape[:-1]), shape_of(node)
        at = next((i for i in range(len(after)) if math.prod(after[:i]) == before and after[i] > 1), None)
        return 0 if at is None or after[at] >= shape[-1] else after[at]
    place = _CUTS.get(aten_name(node))
    if place is None:
        return 0
    dim = node.kwargs.get("dim", dict(enumerate(args_of(node))).get(place, 0))
    return int(isinstance(dim, int) and dim in (-1, len(shape) - 1))


def _with_rows(node: Node, split: RowSplit) -> Found:
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
