"""A captured graph as a list of instructions, in which a layer's forward and backward pass are one instruction each."""

import contextlib
import dataclasses
import operator
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import torch
from torch.fx import GraphModule, Node

from torch_shard._capture import node_form, value_form
from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.fx import args_of, outputs_of, sources_of
from torch_shard._common.host_memory import to_device, to_host
from torch_shard._common.random import Key
from torch_shard._lowering import RowSplit, lower, operation
from torch_shard._scan.partition import Halves, partition
from torch_shard._scan.region import LAYER, LAYER_BACKWARD, Call, Region

Place = jax.Array | int | None

Operate = Callable[[Key, Place, Sequence[Any], RowSplit | None], Any]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor: an input of the program by its number, or what an instruction gives, with indices into it."""

    source: "int | Instruction"
    path: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> "Operand":
        return Operand(self.source, (*self.path, index))


@dataclasses.dataclass(frozen=True)
class BundleValues:
    """A bundle: the value of each member, None for one that is zero."""

    values: tuple[Operand | None, ...]


Output = Operand | BundleValues | object
"""An output of a graph: some are not tensors."""


@dataclasses.dataclass(eq=False)
class Instruction:
    """One operation.

    Attributes:
        kind: Instructions of one kind do the same to their sources.
        sources: What it works on.
        operate: `(random key, place in its stream, values of the sources, how rows lie) -> value`.
        place: Where it stands in the stream of random numbers, if it draws any.
        layer: The path of the module that it is the forward or backward pass of, if it is one.
        is_backward: Whether it is the backward pass.
        is_sum: Whether it adds two tensors.
        fake: What it gives, if it is a node of the graph.
    """

    kind: Hashable
    sources: list[Operand]
    operate: Operate
    place: int | None = None
    layer: str | None = None
    is_backward: bool = False
    is_sum: bool = False
    fake: torch.Tensor | None = None

    def scope(self, *, of_all: bool = False) -> contextlib.AbstractContextManager[object]:
        """Names for what it is lowered to, so that profiles and previews read by module; in a loop `of_all` layers."""
        if self.layer is None:
            return contextlib.nullcontext()
        if of_all:
            return jax.named_scope(re.sub(r"\d+$", "*", self.layer))
        return jax.named_scope(f"backward/{self.layer}" if self.is_backward else self.layer)


@dataclasses.dataclass(frozen=True)
class Passes:
    """The two passes of a region as operations.

    Attributes:
        forward: Gives the results, the token, and what is saved.
        backward: Takes the inputs that are at hand, what was saved, and cotangents; None if nothing has a gradient.
        halves: What is at hand and what is saved.
    """

    forward: Operate
    backward: Operate | None
    halves: Halves


@dataclasses.dataclass(frozen=True)
class Saving:
    """What layers leave for their backward pass.

    Attributes:
        remat: What is computed again, one of `REMAT`.
        on_host: Whether it waits in the host's memory.
    """

    remat: str
    on_host: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Narrow:
    """A value, and the wider dtype that it is of for all who read it: one cast follows the stack of a loop.

    Under `compute_dtype` the last that a layer's backward pass does is to cast the gradients of its weights to float32.
    In a loop that would be a stack of twice the bytes, written and read once more.

    Attributes:
        array: In which it is held.
        dtype: That it is of.
    """

    array: Any
    dtype: Any = dataclasses.field(metadata={"static": True})


def wide(value: Any) -> Any:
    """A value in its own dtype."""
    return value.array.astype(value.dtype) if isinstance(value, Narrow) else value


def take_casts_off(graph: GraphModule) -> dict[int, Any]:
    """Let a graph give what it casts last to a wider dtype as it was before; returns the dtypes by number of output."""
    found, outputs = dict[int, Any](), outputs_of(graph.graph)
    for number, node in enumerate(outputs):
        if isinstance(node, Node) and _widens(node):
            found[number], outputs[number] = jax_dtype(node.meta["val"].dtype), args_of(node)[0]
    graph.graph.output_node().args = (tuple(outputs),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return found


def _widens(node: Node) -> bool:
    """Tell whether a node does nothing but cast a floating-point number to a wider one, exactly."""
    if node.target is not torch.ops.aten._to_copy.default or "memory_format" in node.kwargs:
        return False
    before, after = (x.meta["val"].dtype for x in (args_of(node)[0], node))
    if not before.is_floating_point or not after.is_floating_point or before == after:
        return False
    return torch.promote_types(before, after) == after


def _passes(region: Region, saving: Saving, sources: list[list[Operand]]) -> Passes:
    """The passes of a region whose calls have these sources.

    An input of the program, or one that all calls share, is still at hand in the backward pass; another is saved.
    """
    remat = "block" if region.remat else saving.remat
    is_cotangent = [kind == "cotangent" for kind, _ in region.inputs]
    stay = [number for number, _ in enumerate(sources[0]) if _stays([values[number] for values in sources])]
    halves = partition(
        region.graph.module,
        is_cotangent,
        num_results=region.num_results,
        num_outputs=region.graph.num_outputs,
        remat=remat,
        at_hand=stay,
    )
    forward, num_results = lower(halves.forward), len(region.results)

    def operate(key: Key, place: Place, values: Sequence[jax.Array], split: RowSplit | None) -> list[jax.Array | None]:
        found = forward(key, *values, place=0 if place is None else place, split=split)
        saved = found[num_results:]
        return [*found[:num_results], None, *(map(_on_host, saved) if saving.on_host else saved)]

    if halves.backward is None:
        return Passes(operate, None, halves)
    casts, back = take_casts_off(halves.backward), lower(halves.backward)

    def backward(
        key: Key, place: Place, values: Sequence[jax.Array], split: RowSplit | None
    ) -> Sequence[jax.Array | Narrow]:
        values = to_device(list(values)) if saving.on_host else values
        if remat != "none":  # or XLA would see that the forward pass has computed all this, and keep it
            values = jax.lax.optimization_barrier(list(values))
        found = back(key, *values, place=0 if place is None else place, split=split)
        return [Narrow(value, casts[i]) if i in casts else value for i, value in enumerate(found)]

    return Passes(operate, backward, halves)


def _on_host(value: jax.Array) -> jax.Array:
    """What is saved of matrices and larger, in the host's memory."""
    return to_host(value) if value.ndim > 1 else value


def _stays(values: list[Operand]) -> bool:
    return all(isinstance(v.source, int) for v in values) or all(v == values[0] for v in values)


def instructions_of(
    graph: GraphModule, calls: Mapping[int, Call], saving: Saving
) -> tuple[list[Instruction], list[Output]]:
    """The instructions of a graph, and its outputs."""
    builder = _Builder(calls, saving)
    for node in graph.graph.nodes:
        builder.add(node)
    builder.connect()
    outputs = [builder.values[n] if isinstance(n, Node) else n for n in outputs_of(graph.graph)]
    return builder.instructions, outputs


def only_adds_bundles(graph: GraphModule, calls: Mapping[int, Call]) -> bool:
    """Tell whether gradients of bundles are added to each other and returned, and nothing else is done to them."""
    bundles: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.target is operator.getitem and (source := args_of(node)[0]).target is LAYER_BACKWARD:
            call = calls[args_of(source)[0]]
            if list(call.gradients)[args_of(node)[1]] in call.bundles:
                bundles.add(node)
        elif not bundles.isdisjoint(node.all_input_nodes):
            if not _is_sum(node) or not bundles.issuperset(node.all_input_nodes):
                return False
            bundles.add(node)
    return True


def _is_sum(node: Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and not node.kwargs and all(isinstance(a, Node) for a in node.args)


class _Builder:
    def __init__(self, calls: Mapping[int, Call], saving: Saving) -> None:
        self._calls, self._saving = calls, saving
        self.values: dict[Node, Any] = {}
        self.instructions: list[Instruction] = []
        self._forwards: dict[int, Instruction] = {}
        self._backwards: list[tuple[int, Instruction]] = []

    def add(self, node: Node) -> None:
        if node.op == "placeholder":
            self.values[node] = Operand(len(self.values))
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = args_of(node)
            self.values[node] = self.values[source][index]
        elif node.op == "call_function":
            self.values[node] = self._result(node, [self.values[source] for source in sources_of(node)])

    def _result(self, node: Node, sources: list[Any]) -> Any:
        if node.target is LAYER:
            return self._forward(args_of(node)[0], sources)
        if node.target is LAYER_BACKWARD:
            return self._backward(args_of(node)[0], sources)
        if any(not isinstance(source, Operand) for source in sources):
            return self._sum(node, sources)
        place, fake = node.meta.get("random_place"), node.meta.get("val")
        return Operand(
            self._new(Instruction(_kind(node), sources, operation(node), place, is_sum=_is_sum(node), fake=fake))
        )

    def _new(self, instruction: Instruction) -> Instruction:
        self.instructions.append(instruction)
        return instruction

    def _forward(self, number: int, arguments: list[Operand]) -> Operand:
        call = self._calls[number]
        sources = [arguments[i] if member is None else arguments[i][member] for i, member in call.arguments]
        self._forwards[number] = self._new(
            Instruction((LAYER, call.region), sources, _unconnected, call.place, call.path)
        )
        return Operand(self._forwards[number])

    def _backward(self, number: int, sources: list[Operand]) -> list[Operand | BundleValues]:
        call = self._calls[number]
        instruction = self._new(
            Instruction((LAYER_BACKWARD, call.region), sources, _unconnected, call.place, call.path, True)
        )
        self._backwards.append((number, instruction))
        found: list[Operand | BundleValues] = []
        for argument, numbers in call.gradients.items():
            values = {member: Operand(instruction, (i,)) for member, i in numbers.items()}
            bundle = call.bundles.get(argument)
            found.append(BundleValues(tuple(map(values.get, range(len(bundle.names))))) if bundle else values[None])
        return found

    def _sum(self, node: Node, sources: list[BundleValues]) -> BundleValues:
        """The gradients of a layer that is called several times, which autograd adds: nothing else is known here."""
        assert _is_sum(node)
        pairs = zip(*(source.values for source in sources), strict=True)
        return BundleValues(tuple(self._added([v for v in pair if v is not None]) for pair in pairs))

    def _added(self, values: list[Operand]) -> Operand | None:
        if len(values) < 2:
            return values[0] if values else None
        kind = "sum of gradients"
        return Operand(
            self._new(Instruction(kind, values, lambda key, place, values, split: values[0] + values[1], is_sum=True))
        )

    def connect(self) -> None:
        """Let forward passes save what backward passes read."""
        passes: dict[Region, Passes] = {}
        for number, instruction in self._forwards.items():
            region = self._calls[number].region
            if region not in passes:
                same = [s.sources for n, s in self._forwards.items() if self._calls[n].region is region]
                passes[region] = _passes(region, self._saving, same)
            instruction.operate = passes[region].forward
        for number, instruction in self._backwards:
            before, region = self._forwards[number], self._calls[number].region
            mine, num_results = passes[region], len(region.results)
            assert mine.backward is not None
            saved = [before.sources[i] for i in mine.halves.at_hand]
            saved += [Operand(before, (num_results + 1 + i,)) for i in range(mine.halves.num_saved)]  # after the token
            cotangents = [instruction.sources[1 + i] for kind, i in region.inputs if kind == "cotangent"]
            instruction.sources, instruction.operate = [*saved, *cotangents], mine.backward


def _unconnected(key: Key, place: Place, values: Sequence[object], split: RowSplit | None) -> NoReturn:
    raise AssertionError("a layer that was not connected")


def _kind(node: Node) -> Hashable:
    """All of a node but its sources."""
    values = tuple(value_form(n.meta.get("val")) for n in (node, *sources_of(node)))
    return node_form(node, lambda source: "_"), values, node.meta.get("random_axes")
