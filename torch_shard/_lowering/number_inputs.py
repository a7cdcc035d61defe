"""Numbers of a captured graph as inputs: one program for captures that differ in these alone.

Python's numbers stand in a graph as constants: where a slice begins, what a tensor is multiplied by. Two captures that
are otherwise alike are one program that is given the numbers in which they differ; a slice then becomes a dynamic one.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from torch_shard._capture import Captured, bits_of, is_literal, node_form, value_form
from torch_shard._common.dtypes import has_x64
from torch_shard._common.fx import args_of, dtype_of, new_before, shape_of
from torch_shard._lowering.constraints import DIMS, USED_AS
from torch_shard._lowering.interpreter import own_of

aten = torch.ops.aten

Key = int | str
"""A positional argument of an operator, or one by name."""

Place = tuple[int, Key]
"""A number in a graph: the position of the node, and of the argument."""

Kind = Literal["int", "float"]

_NOTES = ("random_place", "random_axes", DIMS, USED_AS)
"""What the lowering reads of the metadata of a node."""

_INT32 = 1 << 31


@dataclasses.dataclass(frozen=True)
class Number:
    """A number in a graph, and as what a program is given it."""

    kind: Kind
    value: int | float


@dataclasses.dataclass(frozen=True)
class GraphOutline:
    """A captured graph in two parts.

    Attributes:
        skeleton: All but the numbers that a program can be given.
        numbers: These.
        literals: Tensors of Python's numbers, by their position in the closure: they are inputs already.
        closed: The other tensors that it closes over, and does not get with each call.
    """

    skeleton: Hashable
    numbers: Mapping[Place, Number]
    literals: Mapping[int, torch.Tensor]
    closed: tuple[torch.Tensor, ...]

    def differences(self, other: "GraphOutline") -> tuple[set[Place], set[int]] | None:
        """The numbers and the literals that differ in another graph; None if anything else does."""
        if self.skeleton != other.skeleton or any(a is not b for a, b in zip(self.closed, other.closed, strict=True)):
            return None
        return self._values_apart(other)

    def is_same(self, other: "GraphOutline") -> bool:
        """Tell whether another graph computes the same now; a tensor made anew in each capture counts by its values."""
        return (
            self.skeleton == other.skeleton
            and self._values_apart(other) == (set(), set())
            and all(a is b or bits_of(a) == bits_of(b) for a, b in zip(self.closed, other.closed, strict=True))
        )

    def _values_apart(self, other: "GraphOutline") -> tuple[set[Place], set[int]]:
        numbers = {
            place for place, number in self.numbers.items() if repr(other.numbers[place]) != repr(number)
        }  # -0.0
        literals = {at for at, tensor in self.literals.items() if bits_of(other.literals[at]) != bits_of(tensor)}
        return numbers, literals


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How a number of an operator becomes an input.

    Attributes:
        key: Under which it is known.
        hidden: Positional arguments that the number and the shape of the result stand for.
        read: The number; None where it is to stay as it is.
        write: Lets a node take it from another.
    """

    key: Key
    hidden: tuple[int, ...]
    read: Callable[[Node], Number | None]
    write: Callable[[Node, Node], None]


def outline_of(
    captured: Captured[Any], given: Mapping[int, int], calls: Mapping[int, Hashable] | None = None
) -> GraphOutline:
    """The outline of a captured graph.

    Args:
        captured: Of which numbers may become inputs.
        given: Numbers of the tensors that it closes over and is given with each call, by their `id`.
        calls: What the calls of layers are, by the numbers that the graph has for them.
    """
    nodes = list(captured.module.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    numbers: dict[Place, Number] = {}
    found: list[Hashable] = [captured.num_outputs, captured.written, captured.num_draws, tuple(captured.axes.items())]
    for node in nodes:
        hidden = set[Key]()
        for rule in _RULES.get(node.target, ()):
            if (number := _read(rule, node)) is not None:
                numbers[order[node], rule.key] = number
                hidden |= {rule.key, *rule.hidden}
                found.append((rule.key, number.kind, type(number.value)))
        form = node_form(node, lambda source: f"%{order[source]}", hidden=hidden, calls=calls or {})
        found.append((form, value_form(node.meta.get("val")), tuple(repr(node.meta.get(name)) for name in _NOTES)))
    literals = {n: t for n, t in enumerate(captured.closure) if is_literal(t) and id(t) not in given}
    found += [
        ("literal",) if n in literals else ("given", given[id(t)]) if id(t) in given else ("closed over",)
        for n, t in enumerate(captured.closure)
    ]
    closed = (t for n, t in enumerate(captured.closure) if n not in literals and id(t) not in given)
    return GraphOutline(tuple(found), numbers, literals, tuple(closed))


def _read(rule: _Rule, node: Node) -> Number | None:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    if not is_tensor or own_of(node) is not None:
        return None
    number = rule.read(node)
    return None if number is None or (number.kind == "int" and not -_INT32 <= number.value < _INT32) else number


# ---- numbers as inputs ----


def split_kinds(numbers: Mapping[Place, Number], places: Collection[Place]) -> dict[Kind, list[Place]]:
    """Places in the order in which a program is given their numbers, by kind."""
    kinds: dict[Kind, list[Place]] = {"int": [], "float": []}
    for place in numbers:
        if place in places:
            kinds[numbers[place].kind].append(place)
    return {kind: found for kind, found in kinds.items() if found}


def vectors(numbers: Mapping[Place, Number], kinds: Mapping[Kind, list[Place]]) -> list[torch.Tensor]:
    """Numbers as the further inputs of a graph that `carry` has made."""
    return [torch.tensor([numbers[place].value for place in places], dtype=_dtype(k)) for k, places in kinds.items()]


def _dtype(kind: Kind) -> torch.dtype:
    return torch.int64 if kind == "int" else torch.float64 if has_x64() else torch.float32


def carry(module: GraphModule, kinds: Mapping[Kind, list[Place]]) -> GraphModule:
    """A copy of a graph that is given the numbers at these places: as its last inputs, a vector for each kind."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    nodes = [copies.get(node) for node in module.graph.nodes]
    start = next(node for node in graph.nodes if node.op != "placeholder")  # repeated layers stay alike from here on
    with graph.inserting_before(start):
        inputs = [graph.placeholder(f"{kind}s") for kind in kinds]
        for vector, (kind, places) in zip(inputs, kinds.items(), strict=True):
            vector.meta["val"] = _like((len(places),), _dtype(kind))
            for number, (position, key) in enumerate(places):
                value = graph.call_function(aten.select.int, (vector, 0, number))
                value.meta["val"] = _like((), _dtype(kind))
                node = nodes[position]
                assert node is not None
                next(rule for rule in _RULES[node.target] if rule.key == key).write(node, value)
    return GraphModule(module, graph)


def _like(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")  # the capture, with its fakes, is over


# ---- the operators ----


def _argument(node: Node, position: int, default: Any = None) -> Any:
    return args_of(node)[position] if len(node.args) > position else default


def _start(node: Node, first: int) -> Number | None:
    """Where a slice of one step begins, by the arguments from `first` on: dim, start, end, step."""
    dim, start, end, step = (_argument(node, first + at, default) for at, default in enumerate((0, None, None, 1)))
    size = shape_of(args_of(node)[0])[dim]
    if node.kwargs or step != 1 or any(isinstance(given, Node) for given in (start, end)):
        return None
    begin, stop, _ = slice(start, end).indices(size)
    return Number("int", begin) if 0 < stop - begin < size else None


def _slice_from(node: Node, start: Node) -> None:
    dim = _argument(node, 1, 0)
    node.target, node.args = aten.narrow.Tensor, (args_of(node)[0], dim, start, shape_of(node)[dim])


def _write_from(node: Node, start: Node) -> None:
    node.args = (*args_of(node)[:2], _argument(node, 2, 0), start, None)


def _index(node: Node) -> Number | None:
    x, dim, index = args_of(node)
    return None if isinstance(index, Node) else Number("int", index % shape_of(x)[dim])


def _select_at(node: Node, index: Node) -> None:
    x, dim, _ = args_of(node)
    shape = list(shape_of(x))
    shape[dim] = 1
    row = new_before(node, aten.narrow.Tensor, (x, dim, index, 1), _like(shape, dtype_of(x)))
    row.meta = {name: value for name, value in row.meta.items() if name in ("val", "custom")}
    node.target, node.args = aten.squeeze.dim, (row, dim)


def _first_of_range(node: Node) -> Number | None:
    start, step = _argument(node, 0), _argument(node, 2, 1)
    is_whole = type(start) is int and step == 1 and not node.meta["val"].is_floating_point()
    return Number("int", start) if is_whole else None


def _range_from(node: Node, start: Node) -> None:
    base = new_before(node, aten.arange.start_step, (0, shape_of(node)[0]), node.meta["val"])
    base.kwargs = node.kwargs
    node.target, node.args, node.kwargs = aten.add.Tensor, (base, start), {}


def _scalar(key: Key, of: int | None, node: Node) -> Number | None:
    """A scalar argument: as PyTorch computes with it, in the floating-point type of the tensor, or whole."""
    value = node.kwargs.get(key) if isinstance(key, str) else _argument(node, key)
    tensor = node if of is None else args_of(node)[of]
    if type(value) not in (int, float) or not isinstance(tensor, Node):
        return None
    dtype = dtype_of(tensor)
    if dtype.is_floating_point or type(value) is float:
        return None if dtype.is_complex or (key == "alpha" and not dtype.is_floating_point) else Number("float", value)  # pyright: ignore
    return Number("int", value) if dtype in (torch.int64, torch.int32, torch.bool) and key != "alpha" else None  # pyright: ignore


def _put(key: Key, node: Node, value: Node) -> None:
    if isinstance(key, str):
        node.kwargs = {**node.kwargs, key: value}
    else:
        node.args = (*node.args[:key], value, *node.args[key + 1 :])


def _scalar_rule(key: Key, of: int | None = 0) -> _Rule:
    return _Rule(key, (), functools.partial(_scalar, key, of), functools.partial(_put, key))


_EITHER = (_scalar_rule(0, of=1), _scalar_rule(1))  # n - x arrives as sub(n, x)
_ARITHMETIC = (aten.add, aten.sub, aten.mul, aten.div, aten.remainder, aten.fmod)
_WITH_SCALAR = (*_ARITHMETIC, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)

_RULES: dict[object, tuple[_Rule, ...]] = {
    aten.slice.Tensor: (_Rule(2, (2, 3), lambda node: _start(node, 1), _slice_from),),
    aten.slice_scatter.default: (_Rule(3, (3, 4), lambda node: _start(node, 2), _write_from),),
    aten.select.int: (_Rule(2, (2,), _index, _select_at),),
    aten.arange.start_step: (_Rule(0, (0, 1), _first_of_range, _range_from),),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), (*_EITHER, _scalar_rule("alpha"))),
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode), _EITHER),
    **{packet.Scalar: (_scalar_rule(1),) for packet in _WITH_SCALAR},
    aten.full.default: (_scalar_rule(1, None),),
    aten.full_like.default: (_scalar_rule(1, None),),
    aten.fill.Scalar: (_scalar_rule(1, None),),
    aten.scalar_tensor.default: (_scalar_rule(0, None),),
}
"""The numbers of an operator that may become inputs: shapes do not depend on them."""
