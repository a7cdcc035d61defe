"""Fused projections that are split by their output: pieces that do not line up with the shards.

The rows of a split dim are numbered, and the numbers follow what the forward pass does to the parameter and to its
products: as tensors of stride 0 along all other dims, so that torch's own views do the following and nothing is
computed. Where a piece is cut out whose rows are not spread evenly over the shards, XLA has to move it.

Followed: views, products, pointwise operators, calls of repeated layers. Not followed, and so not found: convolutions,
recurrent layers, embeddings, reductions, reshapes that merge the split dim with another, strided slices (which XLA
gathers though they are even), what a piece is cut into further once it is not even, the bodies of branches and loops,
dims that are split over an axis of the batch (XLA gathers such weights first).
"""

# What the nodes of a graph hold, torch.fx types as anything.
# pyright: reportUnknownArgumentType=false

import dataclasses
import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jax.sharding import PartitionSpec
from torch.fx import Graph, Node

from torch_shard._common.fx import args_of, aten_name, fill_in, outputs_of
from torch_shard._common.operator_families import DIM_VIEWS, MATRIX_PRODUCTS, RESHAPES, is_pointwise
from torch_shard._loss import LossProgram
from torch_shard._scan import LAYER, Call, names_of
from torch_shard._sharding import ResolvedPlan, axes_of, describe_spec

MOST_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Split:
    """One dim of a parameter, split over the mesh."""

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    dim: int
    axes: str
    num_shards: int
    num_pieces: int = 1

    @property
    def rows(self) -> torch.Tensor:
        """The number of its row for each element: of the parameter's shape, in the memory of one dim."""
        size = self.shape[self.dim]
        return (
            torch.arange(size).view([-1 if dim == self.dim else 1 for dim in range(len(self.shape))]).expand(self.shape)
        )

    def is_even(self, rows: torch.Tensor) -> bool:
        """Tell whether every shard holds as many of these rows; of an entry in pieces it has its part of each."""
        size = self.shape[self.dim] // self.num_pieces
        counts = torch.bincount(rows.flatten() % size // (size // self.num_shards), minlength=self.num_shards)
        return bool((counts == counts[0]).all())


@dataclasses.dataclass(frozen=True)
class Fused:
    """A parameter whose output dim is split otherwise than the model cuts it; printed, the warning.

    Attributes:
        split: The dim.
        pieces: How many rows each piece has.
        others: Names of further parameters of which the same holds.
    """

    split: Split
    pieces: tuple[int, ...]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        split, size = self.split, self.split.shape[self.split.dim]
        more = f" (and {len(self.others)} more like it, up to {self.others[-1]})" if self.others else ""
        shown = ", ".join(map(str, self.pieces[:MOST_SHOWN])) + (", ..." if len(self.pieces) > MOST_SHOWN else "")
        return (
            f"{split.name} {split.shape}{more}: {describe_spec(split.spec)} splits dim {split.dim} = {size} into "
            f"shards of {size // split.num_shards} ({split.axes}), and the model cuts it into {len(self.pieces)} "
            f"pieces of {shown}, of which not every shard holds an equal part. The results are right, but every pass, "
            "forward and backward, moves the pieces between devices (all-to-all, collective-permute or all-gather). "
            f"{self._in_pieces()}Give each piece a layer of its own (q, k and v; gate and up), or order the rows so "
            f"that each shard holds an equal part of every piece (whole heads of q, k and v){self._other_dim()}."
        )

    def _in_pieces(self) -> str:
        """How it would be stored in pieces of one size, if it has them and they divide."""
        split, num = self.split, len(self.pieces)
        alike = len(set(self.pieces)) == 1 and sum(self.pieces) == split.shape[split.dim]
        if not alike or split.num_pieces > 1 or self.pieces[0] % split.num_shards:
            return ""
        form = f"Pieces({num}, dim={split.dim})"
        return f'Store it in pieces, ShardingPlan(..., stored={{"{split.name}": ts.{form}}}), and its bias alike. '

    def _other_dim(self) -> str:
        """The same axis on the other dim of a matrix, if that divides."""
        split, parts = self.split, [*self.split.spec, None]
        if len(split.shape) != 2 or parts[1 - split.dim] is not None or split.shape[1 - split.dim] % split.num_shards:
            return ""
        swapped = PartitionSpec(None, parts[0]) if split.dim == 0 else PartitionSpec(parts[1])
        return f", or split its other dim, {describe_spec(swapped)}, for one gather or sum instead"


def find_fused(program: LossProgram, plan: ResolvedPlan, batch_spec: PartitionSpec) -> list[Fused]:
    """Find the fused projections of a program whose pieces do not line up with their shards.

    Args:
        program: Only its forward pass is followed.
        plan: How its parameters are split.
        batch_spec: How the batch is split.
    """
    graph, num_grads = program.program.graph.module.graph, len(program.program.graph.aux.grads)
    loss, *rest = outputs_of(graph)
    splits = _splits(itertools.chain(*map(names_of, program.inputs)), plan, batch_spec)
    follow = _Follow({} if program.rolled is None else program.rolled.calls)
    rows = {name: {split: split.rows for split in splits if split.name == name} for name in plan.entries}
    inputs = [rows[at] if isinstance(at, str) else [rows[name] for name in at.names] for at in program.inputs]
    follow.run(graph, inputs, [loss, *rest[num_grads:]])
    alike: dict[Hashable, list[Fused]] = {}
    for found in follow.found():
        key = found.split.shape, found.split.spec, found.split.dim, found.pieces
        alike.setdefault(key, []).append(found)
    return [
        dataclasses.replace(first, others=tuple(dict.fromkeys(other.split.name for other in others)))
        for first, *others in alike.values()
    ]


def _splits(names: Iterable[str], plan: ResolvedPlan, batch_spec: PartitionSpec) -> list[Split]:
    """The split dims of matrices and what has more dims, but for those split over axes of the batch."""
    taken = set(axes_of(batch_spec))
    found: list[Split] = []
    for name in names:
        shape, spec, sizes = plan.entries[name].shape, plan[name].spec, plan.mesh.shape
        for dim, axes in enumerate(axes_of((entry,)) for entry in spec):
            num_shards = math.prod(sizes[axis] for axis in axes)
            if len(shape) > 1 and num_shards > 1 and not taken.intersection(axes):
                shown = ", ".join(f"{axis}={sizes[axis]}" for axis in axes)
                kept = plan.entries[name].kept
                num_pieces, cut_dim = (kept and kept.cut) or (1, None)
                num_pieces = num_pieces if cut_dim == dim - len(shape) else 1
                found.append(Split(name, shape, spec, dim, shown, num_shards, num_pieces))
    return found


Rows = dict[Split, torch.Tensor]


class _Follow:
    """Follows rows through graphs, and notes what is cut."""

    def __init__(self, calls: Mapping[int, Call]) -> None:
        self._calls = calls
        self._cuts: dict[tuple[Split, tuple[int, ...]], dict[tuple[int, int], bool]] = {}
        """By the split and the shape that it was cut in: for each piece, by its first row and size, if it is even."""

    def found(self) -> Iterable[Fused]:
        """Projections that are cut into several pieces, of most of them: a crop or a few rows move little."""
        for (split, shape), pieces in self._cuts.items():
            sizes = tuple(size for _, size in sorted(pieces))
            is_partition = len(sizes) > 1 and 0.5 <= sum(sizes) / math.prod(shape) <= 1
            if is_partition and not all(pieces.values()):
                yield Fused(split, sizes)

    def run(self, graph: Graph, inputs: Sequence[Rows | list[Rows]], outputs: Sequence[object]) -> list[Rows]:
        """The rows in the outputs, given those in the first inputs."""
        needed, given = _ancestors(outputs), iter(inputs)
        known: dict[Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given, Rows())
            elif node in needed:
                known[node] = self._results(node, known) if node.op == "call_function" else {}
        return [known[node] if isinstance(node, Node) else {} for node in outputs]

    def _results(self, node: Node, known: Mapping[Node, Any]) -> Rows | list[Rows]:
        """The rows in a result, or in each of several."""
        if node.target is operator.getitem:
            source, index = args_of(node)
            return known[source][index] if isinstance(known[source], list) else {}
        if node.target is LAYER:
            return self._layer(node, known)
        found: dict[Split, list[torch.Tensor | None]] = {}
        for source in node.all_input_nodes:
            for split, rows in known[source].items() if isinstance(known[source], dict) else ():
                if (moved := _moved(node, source, rows)) is not None:
                    found[split] = self._pieces(
                        split, rows, list(moved) if isinstance(moved, (list, tuple)) else [moved]
                    )
        results = node.meta.get("val")
        per_result = [
            {split: kept for split, pieces in found.items() if (kept := pieces[i]) is not None}
            for i in range(len(results) if isinstance(results, (list, tuple)) and found else 1)
        ]
        return per_result if isinstance(results, (list, tuple)) and found else per_result[0]

    def _pieces(self, split: Split, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Note what is cut; what is not even is not followed further."""
        whole = _distinct(rows)
        kept: list[torch.Tensor | None] = []
        for part in parts:
            piece = _distinct(part)
            even = part.numel() > 0 and split.is_even(piece)
            if 0 < piece.numel() < whole.numel():
                self._cuts.setdefault((split, tuple(whole.shape)), {})[int(piece.min()), piece.numel()] = even
            kept.append(part if even else None)
        return kept

    def _layer(self, node: Node, known: Mapping[Node, Any]) -> list[Rows]:
        """The rows in the results of a repeated layer."""
        number, tensors = args_of(node)
        call, region = self._calls[number], self._calls[number].region
        rows = [known[tensor] for tensor in tensors]
        values = iter([rows[i] if member is None else rows[i][member] for i, member in call.arguments])
        inputs = [Rows() if kind == "cotangent" else next(values) for kind, _ in region.inputs]
        outputs, graph = outputs_of(region.graph.module.graph), region.graph
        results = outputs[: region.num_results] + outputs[graph.num_outputs :]
        return [*self.run(graph.module.graph, inputs, results), {}]  # the last is the token


def _ancestors(outputs: Iterable[object]) -> set[Node]:
    found: set[Node] = set()
    waiting = [node for node in outputs if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _distinct(rows: torch.Tensor) -> torch.Tensor:
    """Each row once: without the dims along which nothing changes."""
    if rows.numel() == 0:
        return rows
    sizes = zip(rows.shape, rows.stride(), strict=True)
    return rows[tuple(slice(None) if size > 1 and stride else 0 for size, stride in sizes)]


def _moved(node: Node, source: Node, rows: torch.Tensor) -> Any:
    """The rows in the result of an operator, given those in one of its sources; None where they are not followed."""
    op, value = node.target, node.meta.get("val")
    name, shape = aten_name(node), tuple(getattr(value, "shape", ()))
    arguments = args_of(node)
    if name in DIM_VIEWS and callable(op):
        args, kwargs = fill_in((arguments, node.kwargs), lambda _: rows)
        return op(*args, **kwargs)
    if op in RESHAPES:
        try:
            return rows.view(shape)
        except RuntimeError:  # merges dims with rows and dims without
            return None
    if name in MATRIX_PRODUCTS:
        factors = arguments[MATRIX_PRODUCTS[name] :][:2]
        return _product(rows, source is factors[0], shape) if source in factors else None
    return rows if is_pointwise(node) and tuple(rows.shape) == shape else None


def _product(rows: torch.Tensor, is_left: bool, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The rows in a product: of those along a summed dim nothing is left."""
    summed = -1 if is_left else -2
    if rows.ndim < 2 or (rows.size(summed) > 1 and rows.stride(summed)):
        return None
    left = rows.narrow(summed, 0, 1)
    return (left if rows.ndim <= len(shape) else left.squeeze(summed)).expand(shape)  # a vector takes a dim away
