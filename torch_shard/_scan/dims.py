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
        self._calls, self._note = calls, note
        self._results: dict[Region, list[Dim]] = {}
        """Of regions that were run."""
        self._dims: dict[Call, list[Dim]] = {}
        """Of the arguments of calls."""

    def run(self, graph: Graph, inputs: Sequence[Dim]) -> dict[Node, Any]:
        """The dims of all values, given those of the inputs."""
        given = iter(inputs)
        known: dict[Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given, None)
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
        if node.target is LAID and self._note == SEQUENCE:  # keys, and their gradient, say it themselves
            return len(shape_of(node)) - 2 if args_of(node)[1] == SPLIT else None
        value = node.meta.get("val")
        found: list[Dim] = [None] * (len(value) if isinstance(value, Sequence) else 1)
        for source in dict.fromkeys(node.all_input_nodes):
            if isinstance(known.get(source), int):
                places = moved(node, source, known[source])
                found = [old if new is None else new for old, new in zip(places, found, strict=True)]
        return found if isinstance(value, Sequence) else found[0]

    def _layer(self, node: Node, known: Mapping[Node, Any]) -> list[Dim]:
        """Those of the results of a repeated layer, or of the gradients of its arguments, which lie like these."""
        call = self._calls[args_of(node)[0]]
        if node.target is LAYER:
            dims = [known[tensor] for tensor in args_of(node)[1]]
            inputs = [dims[i] if member is None else None for i, member in call.arguments]
            self._dims[call] = dims
            return [*self._of_region(call.region, inputs), None]  # the last is the token
        dims = self._dims[call]
        return [dims[argument] for argument in call.gradients]

    def _of_region(self, region: Region, tensors: Sequence[Dim]) -> list[Dim]:
        if region not in self._results:
            graph, given = region.graph.module.graph, iter(tensors)
            before = [None if kind == "cotangent" else next(given) for kind, _ in region.inputs]
            known = self.run(graph, before)
            results = [known.get(node) for node in region.results]
            cotangents = list(itertools.compress(itertools.compress(results, region.differentiable), region.used))
            given = iter(tensors)
            self.run(graph, [cotangents[n] if kind == "cotangent" else next(given) for kind, n in region.inputs])
            self._results[region] = results
        return self._results[region]


def moved(node: Node, source: Node, dim: int) -> list[Dim]:
    """Where the dim of a source is in the result of an operator, or in each of several; both counted from the first."""
    value, name = node.meta.get("val"), aten_name(node)
    if name in DIM_VIEWS:
        return _viewed(node, source, dim)
    if isinstance(value, Sequence):
        if name == "convolution_backward":  # of the input, of the weight, of the bias
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
    if name in ("linear", "embedding", "convolution") and source is not args_of(node)[name == "embedding"]:
        return [None]  # a weight
    return [_in_place(node, source, dim, value)]


def _in_place(node: Node, source: Node, dim: int, value: object) -> Dim:
    """The same dim, if its size is the same: counted from the last one where values broadcast, else from the first."""
    if not isinstance(value, torch.Tensor):
        return None
    size, from_last = shape_of(source)[dim], dim + value.ndim - len(shape_of(source))
    places = (from_last, dim) if is_pointwise(node) else (dim, from_last)
    return next((at for at in places if 0 <= at < value.ndim and value.shape[at] == size), None)


def _viewed(node: Node, source: Node, dim: int) -> list[Dim]:
    """By PyTorch itself: of a tensor that has a stride along that dim alone."""
    shape = shape_of(source)
    marked = torch.empty_strided(shape, [int(at == dim) for at in range(len(shape))], device="meta")
    found = _run(node, lambda _: marked)
    results = [found] if isinstance(found, torch.Tensor) else found
    return [next((at for at, stride in enumerate(r.stride()) if stride and r.shape[at] > 1), None) for r in results]


def _contracted(node: Node, source: Node, dim: int) -> Dim:
    """By PyTorch itself: of tensors of one element, but for a source that has two along that dim."""

    def marked(x: Node) -> torch.Tensor:
        sizes = [1 + (x is source and at == dim) for at in range(len(shape_of(x)))]
        return torch.empty(sizes, device="meta")

    return next((at for at, size in enumerate(_run(node, marked).shape) if size > 1), None)


def _run(node: Node, value_of: Callable[[Node], torch.Tensor]) -> Any:
    """What a node's operator gives for other tensors."""
    args, kwargs = fill_in((node.args, node.kwargs), value_of)
    return target_of(node)(*args, **kwargs)


def _reshaped(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> Dim:
    """The dim with as many elements before it: `dim` with what was merged behind it, or a first part of it."""
    outer = math.prod(before[:dim])
    for at, size in enumerate(after):
        if math.prod(after[:at]) == outer and size > 1:
            return at
    return None


def _in_product(node: Node, source: Node, dim: int) -> Dim:
    first = MATRIX_PRODUCTS[aten_name(node)]
    factors = args_of(node)[first : first + 2]
    if source not in factors:
        return _in_place(node, source, dim, node.meta["val"])
    ndim, is_left = len(shape_of(source)), source is factors[0]
    if ndim < 2 or dim == (ndim - 1 if is_left else ndim - 2):
        return None  # summed
    return dim + len(shape_of(node)) - ndim
