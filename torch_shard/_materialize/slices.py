"""A captured graph cut by its outputs: how each tensor comes about, alone.

Random numbers that several outputs share are drawn in each of them, from the stream of the first, and so are the same.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from torch_shard._common.fx import args_of, aten_name, fill_in, outputs_of, target_of
from torch_shard._common.operator_families import FILLS
from torch_shard._common.types import PyTree
from torch_shard._lowering import refuse_generator

aten = torch.ops.aten

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})

# Of their first argument these read the shape alone.
_SHAPE_ONLY = frozenset(
    {"uniform", "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "random", "copy", "fill"}
    | {"full_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like"}
    | {"new_full", "new_zeros", "new_ones"}
)

_BERNOULLI = (aten.bernoulli.p, aten.bernoulli.Tensor)

_FILLS = FILLS | {"expand", "view"}


Fill = bool | float
"""Value that unwritten memory is taken to hold."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """The slice of a graph that makes one tensor.

    Two slices are equal if they are the same up to where their random numbers and their inputs come from.

    Attributes:
        nodes: The calls, in order; the last is the tensor, unless it is an input.
        inputs: The placeholders that they read.
        output: The tensor.
        streams: Numbers of the outputs whose streams of random numbers it draws from.
        draws: For each random node, which of `streams`, and the place in it.
        text: What the calls are.
    """

    nodes: tuple[Node, ...] = dataclasses.field(compare=False)
    inputs: tuple[Node, ...] = dataclasses.field(compare=False)
    output: Node = dataclasses.field(compare=False)
    streams: tuple[int, ...] = dataclasses.field(compare=False)
    draws: dict[Node, tuple[int, int]] = dataclasses.field(compare=False)
    text: str

    @property
    def unwritten(self) -> tuple[Node, ...]:
        """Memory that nobody has written when it is read."""
        return tuple(node for node in self.nodes if aten_name(node) in _EMPTY)

    @property
    def is_fill(self) -> bool:
        """Tell whether it is one number everywhere."""
        return not self.inputs and all(aten_name(node) in _FILLS for node in self.nodes)

    def run(self, inputs: Sequence[PyTree], call: Callable[[Node, Callable[[Node], PyTree]], PyTree]) -> PyTree:
        """The tensor, from the values of the inputs and `call(node, values of its sources)`."""
        values: dict[Node, PyTree] = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            values[node] = call(node, values.__getitem__)
        return values[self.output]


def cut(graph: GraphModule) -> list[Slice]:
    """The slice of each output."""
    for node in list(graph.graph.nodes):
        if aten_name(node) in _SHAPE_ONLY or node.target in _BERNOULLI:
            _take_shape_only(node)
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    outputs = outputs_of(graph.graph)
    origin: dict[object, tuple[int, int]] = {}
    return [
        _slice(number, sorted(_behind(out), key=order.__getitem__), out, origin) for number, out in enumerate(outputs)
    ]


def _take_shape_only(node: Node) -> None:
    like = args_of(node)[0].meta["val"]
    with node.graph.inserting_before(node):
        full = node.graph.call_function(aten.full.default, (list(like.shape), 0), {"dtype": like.dtype})
    full.meta["val"] = like
    node.update_arg(0, full)


def _behind(output: Node) -> set[Node]:
    found, waiting = {output}, [output]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _slice(number: int, nodes: Iterable[Node], output: Node, origin: dict[object, tuple[int, int]]) -> Slice:
    nodes = list(nodes)
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    calls = tuple(node for node in nodes if node.op == "call_function")
    for node in calls:
        refuse_generator(target_of(node), dict(node.kwargs))
    places = dict.fromkeys(node.meta["random_place"] for node in calls if "random_place" in node.meta)
    for index, place in enumerate(places):
        origin.setdefault(place, (number, index))
    streams = tuple(dict.fromkeys(origin[place][0] for place in places))
    draws = {
        node: (streams.index(origin[place][0]), origin[place][1])
        for node in calls
        if (place := node.meta.get("random_place")) is not None
    }
    return Slice(calls, inputs, output, streams, draws, _text(inputs, calls, output, draws))


def _text(inputs: Iterable[Node], calls: Iterable[Node], output: Node, draws: dict[Node, tuple[int, int]]) -> str:
    names = {node: f"%in{i}" for i, node in enumerate(inputs)}
    lines = [f"{node.meta['val'].dtype} {tuple(node.meta['val'].shape)}" for node in inputs]
    for i, node in enumerate(calls):
        names[node] = f"%{i}"
        arguments = fill_in((node.args, node.kwargs), names.__getitem__)
        lines.append(f"{node.target} {arguments} {draws.get(node)}")
    return "\n".join([*lines, names[output]])


def call_in_torch(fills: Mapping[Node, Fill], node: Node, value_of: Callable[[Node], PyTree]) -> PyTree:
    """Run a node in eager torch, unwritten memory being filled with these numbers."""
    if node in fills:
        fake = node.meta["val"]
        return torch.full(fake.shape, fills[node], dtype=fake.dtype)
    args, kwargs = fill_in((node.args, node.kwargs), value_of)
    return target_of(node)(*args, **kwargs)


def is_constant(node: Node) -> bool:
    """Tell whether PyTorch knows the value before anything runs, and JAX has no operator for it."""
    return node.target is aten.linspace.default


def fills_of(graph_slice: Slice) -> list[dict[Node, Fill]]:
    """Two ways to fill unwritten memory: where it shows in the tensor, they differ."""
    return [{node: _fill(node.meta["val"].dtype, way) for node in graph_slice.unwritten} for way in (False, True)]


def _fill(dtype: torch.dtype, way: bool) -> Fill:
    if dtype is torch.bool:
        return way
    return (float("nan") if way else 1.0) if dtype.is_floating_point or dtype.is_complex else (77 if way else 0)


def host_value(
    graph_slice: Slice, inputs: Sequence[torch.Tensor], fills: Mapping[Node, Fill] | None = None
) -> torch.Tensor:
    """The tensor by eager torch on the CPU, of a slice without random numbers."""
    with torch.no_grad():
        return graph_slice.run(inputs, functools.partial(call_in_torch, fills or {}))
