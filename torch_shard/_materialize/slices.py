"""A captured graph cut by its outputs: how each tensor comes about, alone.

Random numbers that several outputs share are drawn in each of them, from the stream of the first, and so are the same.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import torch
from jax.extend.random import define_prng_impl, threefry_prng_impl
from torch.fx import GraphModule, Node

from torch_shard._common.fx import FILLS, args_of, aten_name, fill_in, outputs_of, target_of
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


# Random bits without memory: JAX's own stream, written so that a compiler fuses it into whatever uses it.
#
# On the CPU, JAX's threefry is a loop whose counters lie in memory, three times as large as the result. The same
# numbers come here from twenty rounds in a row, which are element by element and so need no memory, on whatever shards
# they lie.


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

_PARITY = 0x1BD11BDA  # Salmon et al. 2011, Threefry-2x32 with 20 rounds


def _threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = high + keys[0], low + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def counters(shape: tuple[int, ...], limit: int = 1 << 32) -> tuple[jax.Array, jax.Array]:
    """Two words that number the elements; in the order of memory, as JAX does, while one word is enough."""
    high, low, stride = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        if stride * shape[dim] <= limit:
            low, stride = low + index * jnp.uint32(stride % (1 << 32)), stride * shape[dim]
        else:  # numbered in the other word, in which the dims before it that went there come first
            high = high + index * jnp.uint32(math.prod(shape[dim + 1 :]) // stride)
    return high, low


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    x, y = _threefry(key, *counters(tuple(shape)))
    if bit_width == 64:
        return (x.astype(jnp.uint64) << 32) | y.astype(jnp.uint64)
    return (x ^ y).astype(f"uint{bit_width}")


FUSED = define_prng_impl(
    key_shape=threefry_prng_impl.key_shape,
    seed=threefry_prng_impl.seed,
    split=threefry_prng_impl.split,
    fold_in=threefry_prng_impl.fold_in,
    random_bits=_random_bits,
    name="threefry2x32_fused",
    tag="fused",
)
"""For `jax.random.key(seed, impl=FUSED)`; up to 2**32 elements the numbers are those of `jax.random.key(seed)`."""
