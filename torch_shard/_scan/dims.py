"""Which dim of each value in a captured program runs over the rows of the batch: noted on the nodes, for the lowering.

It says how values are best split over devices, never what they are, so that an operator which is not known may be
guessed at: a dim that goes on in the same place with the same size.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_shard._common.fx import (
    DIM_VIEWS,
    MATRIX_PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    args_of,
    aten_name,
    fill_in,
    is_pointwise,
    shape_of,
    target_of,
)
from torch_shard._lowering import DIMS, LAID, ROWS, SEQUENCE, SPLIT
from torch_shard._scan.region import LAYER, LAYER_BACKWARD, Call, Region

Dim = int | None

_OF_TABLES = frozenset({"embedding_dense_backward", "_embedding_bag_backward"})
"""Operators that sum over the rows."""


def note_rows(graph: Graph, inputs: Sequence[Dim], calls: Mapping[int, Call], note: str = ROWS) -> None:
    """Note on each node of a graph, and of the layers in it, which dim of its value has the rows of the batch.

    Args:
        graph: Functional.
        inputs: The dims of its inputs.
        calls: The calls of layers in it.
        note: Under which name; `SEQUENCE` for the dim that has the sequence, which is followed alike.
    """
    _Follow(calls, note).run(graph, inputs)


class _Follow:
    def __init__(self, calls: Mapping[int, Call], note: str) -> None:
        self._calls = calls
        self._note = note
        self._results: dict[Region, list[Dim]] = {}
        """Of regions that were run."""
        self._dims: dict[Call, list[Dim]] = {}
        """Of the arguments of calls."""

    def run(self, graph: Graph, inputs: Sequence[Dim]) -> dict[Node, Any]:
        """The dims of all values, given those of the inputs."""
        input_dims = iter(inputs)
        known: dict[Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                known[node] = next(input_dims, None)  # what is closed over follows the inputs
            elif node.op == "call_function":
                known[node] = self._result(node, known)
            if isinstance(known.get(node), int):
                node.meta[DIMS] = {**node.meta.get(DIMS, {}), self._note: known[node]}
        return known

    def _result(self, node: Node, known: Mapping[Node, Any]) -> Any:
        """The dim of a result, or a list of those of several."""
        if node.target is operator.getitem:
            source, index = args_of(node)
            return known[source][index] if isinstance(known[source], list) else None
        if node.target in (LAYER, LAYER_BACKWARD):
            return self._layer(node, known)
        if node.target is LAID and self._note == SEQUENCE:
            # Keys of attention, and their gradient, say it themselves: `(..., sequence, features)`.
            return len(shape_of(node)) - 2 if args_of(node)[1] == SPLIT else None

        value = node.meta.get("val")
        dims: list[Dim] = [None] * (len(value) if isinstance(value, Sequence) else 1)
        for source in dict.fromkeys(node.all_input_nodes):
            if not isinstance(known.get(source), int):
                continue
            of_source = moved(node, source, known[source])
            for position, dim in enumerate(of_source):
                if dims[position] is None:  # the first source that says it
                    dims[position] = dim
        return dims if isinstance(value, Sequence) else dims[0]

    def _layer(self, node: Node, known: Mapping[Node, Any]) -> list[Dim]:
        """Those of the results of a repeated layer, or of the gradients of its arguments, which lie like these."""
        call = self._calls[args_of(node)[0]]
        if node.target is LAYER:
            dims = [known[tensor] for tensor in args_of(node)[1]]
            self._dims[call] = dims
            region_dims = [dims[argument] if member is None else None for argument, member in call.arguments]
            token: Dim = None
            return [*self._of_region(call.region, region_dims), token]

        dims = self._dims[call]
        return [dims[argument] for argument in call.gradients]

    def _of_region(self, region: Region, tensors: Sequence[Dim]) -> list[Dim]:
        if region in self._results:
            return self._results[region]

        # Cotangents lie like the results, which the forward pass tells: so twice, the second time with them.
        graph = region.graph.module.graph
        num_cotangents = sum(kind == "cotangent" for kind, _ in region.inputs)
        known = self.run(graph, _inputs_of(region, tensors, [None] * num_cotangents))
        results = [known.get(node) for node in region.results]
        differentiable = itertools.compress(results, region.differentiable)
        cotangents = list(itertools.compress(differentiable, region.used))
        self.run(graph, _inputs_of(region, tensors, cotangents))
        self._results[region] = results
        return results


def _inputs_of(region: Region, tensors: Sequence[Dim], cotangents: Sequence[Dim]) -> list[Dim]:
    """The dims of the inputs of a region's graph."""
    remaining = iter(tensors)
    return [cotangents[number] if kind == "cotangent" else next(remaining) for kind, number in region.inputs]


def moved(node: Node, source: Node, dim: int) -> list[Dim]:
    """Where the dim of a source is in the result of an operator, or in each of several; both counted from the first."""
    value = node.meta.get("val")
    name = aten_name(node)
    if name in DIM_VIEWS:
        return _viewed(node, source, dim)
    if isinstance(value, Sequence):
        if name == "convolution_backward":
            # The gradients of the input, of the weight and of the bias: the last two are sums over the rows.
            return [0 if dim == 0 else None, None, None]
        return [_in_place(node, source, dim, each) for each in value]
    if not isinstance(value, torch.Tensor):
        return [None]
    if node.target in RESHAPES:
        return [_reshaped(shape_of(source), dim, tuple(value.shape))]
    if name in MATRIX_PRODUCTS:
        return [_in_product(node, source, dim)]
    if name in _OF_TABLES:
        return [None]
    if node.target is torch.ops.torch_shard.einsum.default or name == "tensordot" or name in REDUCTIONS:
        return [_contracted(node, source, dim)]
    if name in ("linear", "embedding", "convolution"):
        data = args_of(node)[1 if name == "embedding" else 0]
        if source is not data:
            return [None]  # a weight
    return [_in_place(node, source, dim, value)]


def _in_place(node: Node, source: Node, dim: int, value: object) -> Dim:
    """The same dim, if its size is the same: counted from the last one where values broadcast, else from the first."""
    if not isinstance(value, torch.Tensor):
        return None
    shape = shape_of(source)
    from_last = dim + value.ndim - len(shape)
    places = (from_last, dim) if is_pointwise(node) else (dim, from_last)
    for place in places:
        if 0 <= place < value.ndim and value.shape[place] == shape[dim]:
            return place
    return None


def _viewed(node: Node, source: Node, dim: int) -> list[Dim]:
    """By PyTorch itself: of a tensor that has a stride along that dim alone."""
    shape = shape_of(source)
    strides = [1 if position == dim else 0 for position in range(len(shape))]
    marked = torch.empty_strided(shape, strides, device="meta")
    output = _run(node, lambda _: marked)
    views = [output] if isinstance(output, torch.Tensor) else output
    return [_first_marked(view) for view in views]


def _first_marked(view: torch.Tensor) -> Dim:
    for position, stride in enumerate(view.stride()):
        if stride and view.shape[position] > 1:
            return position
    return None


def _contracted(node: Node, source: Node, dim: int) -> Dim:
    """By PyTorch itself: of tensors of one element, but for a source that has two along that dim."""

    def marked(x: Node) -> torch.Tensor:
        sizes = [1] * len(shape_of(x))
        if x is source:
            sizes[dim] = 2
        return torch.empty(sizes, device="meta")

    for position, size in enumerate(_run(node, marked).shape):
        if size > 1:
            return position
    return None


def _run(node: Node, value_of: Callable[[Node], torch.Tensor]) -> Any:
    """What a node's operator gives for other tensors."""
    args, kwargs = fill_in((node.args, node.kwargs), value_of)
    return target_of(node)(*args, **kwargs)


def _reshaped(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> Dim:
    """The dim with as many elements before it: `dim` with what was merged behind it, or a first part of it."""
    elements_before = math.prod(before[:dim])
    for position, size in enumerate(after):
        if math.prod(after[:position]) == elements_before and size > 1:
            return position
    return None


def _in_product(node: Node, source: Node, dim: int) -> Dim:
    first = MATRIX_PRODUCTS[aten_name(node)]
    factors = args_of(node)[first : first + 2]
    if source not in factors:
        return _in_place(node, source, dim, node.meta["val"])

    ndim = len(shape_of(source))
    summed_dim = ndim - 1 if source is factors[0] else ndim - 2
    if ndim < 2 or dim == summed_dim:
        return None
    return dim + len(shape_of(node)) - ndim
