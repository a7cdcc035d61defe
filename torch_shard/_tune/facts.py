"""What a step does, whatever splits it: its arithmetic, and what its backward pass needs. Read from captures."""

# PyTorch types what nodes hold as anything.
# pyright: reportUnknownMemberType=false

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from torch_shard._capture import Captured, Precision, capture
from torch_shard._common.fx import operator_name, outputs_of
from torch_shard._common.types import PyTree
from torch_shard._loss import HostValues, JointLoss, LossShape, capture_with, flatten_batch
from torch_shard._lowering import keeps_whole
from torch_shard._scan import LayerOptions
from torch_shard._sharding import LossFn
from torch_shard._tune.layers import Shorter
from torch_shard._tune.products import ATTENTION, flops_of

VIEWS = ("view", "reshape", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "getitem", "alias", "select")
"""Operators whose results are no values of their own."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """Values of one kind that the backward pass needs.

    Attributes:
        num_bytes: Of the whole.
        width: Their last dim.
        repeated: Whether they are of repeated layers.
        kind: `"product"`, what a product gives; or `"other"`.
    """

    num_bytes: int
    width: int
    repeated: bool
    kind: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a loss and its gradients do, for the whole batch.

    Attributes:
        flops: Of products, forward and backward.
        repeated: Flops of the products of a forward pass in repeated layers.
        attention: Flops of attention beside its projections, of a forward pass.
        by_module: Flops of products by the path of the module, both passes.
        outputs: Bytes of the results of products and tables by the path of the module, forward.
        saved: What the backward pass needs.
        inputs: Bytes of what repeated layers are given, all of them together.
        layer: Bytes that the backward pass needs of one repeated layer, the largest.
        layers: Number of repeated layers in each group of those that look alike.
        operators: In all, each group of repeated layers counted once.
        fingerprint: Of the captured graph: alike for programs that are alike.
    """

    flops: float
    repeated: float
    attention: float
    by_module: Mapping[str, float]
    outputs: Mapping[str, int]
    saved: tuple[Saved, ...]
    inputs: int
    layer: int
    layers: tuple[int, ...]
    operators: int
    fingerprint: str


def facts_of(
    model: nn.Module, loss_fn: LossFn, batch: PyTree, precision: Precision, *, alike: Sequence[Sequence[str]]
) -> Facts:
    """Capture a loss with its gradients, and read what they do.

    Args:
        model: Read, not changed.
        loss_fn: Its loss.
        batch: Tensors or shapes.
        precision: What the loss is computed in.
        alike: Paths of repeated layers, by group.
    """
    leaves, signature = flatten_batch(batch)
    host = HostValues(leaves, signature, dict(model.named_buffers()).__getitem__).of()
    fn, specs = JointLoss(model, loss_fn, signature, precision=precision, train=True, host=host)()
    graph = capture_with(host, lambda: capture(fn, specs, keep=keeps_whole))
    return _Reader(graph, alike).facts()


def alike_layers(model: nn.Module) -> list[list[str]]:
    """Paths of layers that look alike, by group."""
    groups = LayerOptions(scan="auto", remat="block").groups(model)
    return [list(group.members.values()) for group in groups if group.refused is None]


def facts_by_layers(
    model: nn.Module, loss_fn: LossFn, batch: PyTree, precision: Precision, *, shorter: Sequence[Shorter], num: int
) -> Facts:
    """The facts of a whole model, from those of copies of it with one and with two iterations of its loops.

    Iterations are one program, so all that is counted grows by the same with each.

    Args:
        model: The whole one, which is not captured.
        loss_fn: Its loss.
        batch: Tensors or shapes.
        precision: What the loss is computed in.
        shorter: Both copies.
        num: Iterations of the whole.
    """
    groups, found = alike_layers(model), list[Facts]()
    layers = {path for group in groups for path in group}
    for short in shorter:
        left = [[short.names[path] for path in group if path in short.left] for group in groups]
        found.append(facts_of(short.module, loss_fn, batch, precision, alike=[own for own in left if own]))
    one, two = found

    def grown(first: float, second: float) -> float:
        return first + (num - 1) * (second - first)

    saved = [{(own.width, own.repeated, own.kind): own.num_bytes for own in facts.saved} for facts in found]
    keys = dict.fromkeys(key for own in saved for key in own)
    counted = {name: grown(getattr(one, name), getattr(two, name)) for name in ("flops", "repeated", "attention")}
    return Facts(
        **counted,
        by_module={path: two.by_module[own] for path, own in shorter[1].names.items() if own in two.by_module},
        outputs={path: two.outputs[own] for path, own in shorter[1].names.items() if own in two.outputs},
        saved=tuple(Saved(int(grown(*(own.get(key, 0) for own in saved))), *key) for key in keys),
        inputs=int(grown(one.inputs, two.inputs)),
        layer=two.layer,
        layers=tuple(map(len, groups)),
        operators=two.operators,
        fingerprint=f"{one.fingerprint} {two.fingerprint} {num} {len(layers)}",
    )


class _Reader:
    def __init__(self, graph: Captured[LossShape], alike: Sequence[Sequence[str]]) -> None:
        nodes = list(graph.module.graph.nodes)
        self._graph = graph.module.graph
        loss = outputs_of(graph.module.graph)[0]
        last = nodes.index(loss) if isinstance(loss, Node) else len(nodes) - 1
        self._alike = alike
        self._members = {path for group in alike for path in group}
        self._own = [node for node in nodes if node.op == "call_function"]
        self._forward = {node for node in nodes[: last + 1] if node.op == "call_function"}

    def facts(self) -> Facts:
        """All of it."""
        flops = {node: flops_of(node) for node in self._own}
        repeated = sum(flops[node] for node in self._forward if self._layer(node))
        by_module, outputs = collections.Counter[str](), collections.Counter[str]()
        for node, count in flops.items():
            by_module[_path(node)] += int(count)
            if node in self._forward and (count or operator_name(node) == "embedding"):
                outputs[_path(node)] += _bytes(node)
        saved, by_layer = self._saved(flops)
        later = {path for group in self._alike for path in group[1:]}
        return Facts(
            flops=sum(flops.values()),
            repeated=repeated,
            attention=sum(flops[node] for node in self._forward if operator_name(node) in ATTENTION),
            by_module={path: float(count) for path, count in by_module.items() if count},
            outputs=dict(outputs),
            saved=saved,
            inputs=sum(self._inputs().values()),
            layer=max(by_layer.values(), default=0),
            layers=tuple(map(len, self._alike)),
            operators=sum(self._layer(node) not in later for node in self._own),
            fingerprint=self._fingerprint(),
        )

    def _fingerprint(self) -> str:
        shapes = [(tuple(t.shape), str(t.dtype)) for node in self._graph.nodes for t in _tensors(node)]
        return hashlib.sha256(f"{self._graph}{shapes}".encode()).hexdigest()

    def _saved(self, flops: Mapping[Node, float]) -> tuple[tuple[Saved, ...], Mapping[str, int]]:
        """What crosses from the forward pass into the backward pass, and how much of it each layer leaves."""
        crossing = dict.fromkeys(
            base
            for node in self._forward
            if any(user not in self._forward and user.op == "call_function" for user in node.users)
            if (base := self._value(node)) is not None
        )
        sums, by_layer = collections.Counter[tuple[int, bool, str]](), collections.Counter[str]()
        for node in crossing:
            layer, size = self._layer(node), _bytes(node)
            sums[_width(node), bool(layer), "product" if flops.get(node) else "other"] += size
            if layer:
                by_layer[layer] += size
        return tuple(Saved(size, *key) for key, size in sums.items()), by_layer

    def _inputs(self) -> Mapping[str, int]:
        """The largest value that each repeated layer takes from outside: bytes by its path."""
        found = dict[str, int]()
        for node in self._forward:
            if layer := self._layer(node):
                given = [self._value(given) for given in node.all_input_nodes]
                sizes = [_bytes(base) for base in given if base is not None and self._layer(base) != layer]
                found[layer] = max([found.get(layer, 0), *sizes])
        return found

    def _value(self, node: Node) -> Node | None:
        """The node whose value this is, or is a view of; None for parameters, what is cast of them, and integers."""
        chain = [node]
        while chain[-1].op == "call_function" and operator_of(chain[-1]) in VIEWS:
            chain.append(chain[-1].all_input_nodes[0])
        base = chain[-1]
        if base.op != "call_function" or not any(t.is_floating_point() for t in _tensors(base)):
            return None
        casts = operator_name(base) in ("_to_copy", "detach", "clone") and len(base.all_input_nodes) == 1
        if casts and self._value(base.all_input_nodes[0]) is None:
            return None
        return base

    def _layer(self, node: Node) -> str:
        """The repeated layer that a node is of; empty if it is of none."""
        path = _path(node)
        while path and path not in self._members:
            path = path.rpartition(".")[0]
        return path


def operator_of(node: Node) -> str:
    """The name of an operator, of PyTorch or of Python."""
    return operator_name(node) or getattr(node.target, "__name__", "")


def _path(node: Node) -> str:
    return (node.meta.get("custom") or {}).get("module", "")


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    value: Any = node.meta.get("val")
    yield from (t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor))


def _bytes(node: Node) -> int:
    return sum(t.numel() * t.dtype.itemsize for t in _tensors(node))


def _width(node: Node) -> int:
    return next((t.shape[-1] for t in _tensors(node) if t.ndim), 1)
