"""The parts of a capture of a loss: operators, their lowerings, what was skipped and what has none."""

from __future__ import annotations

import collections
import dataclasses
import operator

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torch_shard._capture import Captured, Reads, capture
from torch_shard._common.caller import public
from torch_shard._common.printed import InNotebooks
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, check_module
from torch_shard._entries import LossFn
from torch_shard._loss import HostValues, JointLoss, LossShape, LossSource, capture_with, check_loss_fn, flatten_batch
from torch_shard._lowering import LOWERINGS, draws_random, find_lowering, is_own, keeps_whole, place_of


@dataclasses.dataclass(frozen=True)
class Operator:
    """One ATen operator of a capture.

    Attributes:
        name: Of the overload, `aten.mm.default` for example.
        count: How many nodes it has, forward and backward.
        lowering: "torch_shard", "torchax", "yours" (`torch_shard.lowering`), or "none": a step would refuse the model.
        place: Module path, file and line of its first use.
    """

    name: str
    count: int
    lowering: str
    place: str


@dataclasses.dataclass(frozen=True)
class Explanation(InNotebooks):
    """Findings of `explain_capture`; print it with `rich.print`.

    Attributes:
        operators: By number of nodes, the refused ones first.
        num_nodes: Of the whole graph, with inputs.
        closure: Shapes of the tensors that the loss reaches beside the model and the batch.
        written: How many inputs are written in place, without the buffers that are assigned.
        unreached: Trainable parameters that the loss does not reach.
        skipped_checks: Places of checks of values, which a compiled program does not make.
        random: True if it draws random numbers.
        frozen: Numbers and strings that the loss and forward read from outside, in the user's own files: a step keeps
            them until they change, and then compiles again. Those that installed libraries read it keeps forever.

    Example:
        >>> import torch, torch_shard as ts
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.dropout(model(batch)).sum()
        >>> found = ts.explain_capture(torch.nn.Linear(4, 2), loss_fn, torch.ones(8, 4))
        >>> found.random, found.unreached, "aten.mm.default" in [op.name for op in found.operators]
        (True, (), True)
    """

    operators: tuple[Operator, ...]
    num_nodes: int
    closure: tuple[tuple[int, ...], ...]
    written: int
    unreached: tuple[str, ...]
    skipped_checks: tuple[str, ...]
    random: bool
    frozen: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[Operator, ...]:
        """The operators without a lowering."""
        return tuple(op for op in self.operators if op.lowering == "none")

    def __rich__(self) -> Group:
        table = Table(title=f"{self.num_nodes} nodes, {len(self.operators)} operators, {len(self.refused)} refused")
        for column in ("operator", "nodes", "lowering", "first use"):
            table.add_column(column, justify="right" if column == "nodes" else "left", overflow="fold")
        for op in self.operators:
            table.add_row(op.name, str(op.count), op.lowering, op.place, style="red" if op.lowering == "none" else "")
        notes = [f"draws random numbers: {'yes' if self.random else 'no'}"]
        notes += [f"closes over a tensor of shape {shape}" for shape in self.closure]
        notes += [f"does not reach {name}" for name in self.unreached]
        notes += [f"skips the check in {place}" for place in self.skipped_checks]
        notes += [f"keeps {value}" for value in self.frozen]
        return Group(table, Text("\n".join(notes)))


@public
def explain_capture(model: torch.nn.Module, loss_fn: LossFn, batch: PyTree, *, train: bool = True) -> Explanation:
    """Capture a loss as `make_train_step` would, and tell what it consists of. Nothing is compiled or run.

    Args:
        model: Any module, on any device, the meta device too; it is only read.
        loss_fn: `loss_fn(model, batch)`, plain torch; returns what `make_train_step` takes.
        batch: A batch as the step would take it: a pytree of tensors or arrays, of which only shapes and dtypes
            matter, unless Python asks for values.
        train: True for the loss with its gradients; False for the loss in eval mode, as `make_eval_step` has it.

    Returns:
        An `Explanation`; operators without a lowering are part of it.

    Raises:
        TypeError: An argument is of the wrong kind.
        NotImplementedError: Python depends on the value of a tensor; with file and line.

    Example:
        >>> import torch, torch_shard as ts
        >>> model = torch.nn.Linear(4, 2)
        >>> found = ts.explain_capture(model, lambda model, batch: model(batch).square().mean(), torch.ones(8, 4))
        >>> found.refused, found.random
        ((), False)
    """
    model = check_module("model", model)
    check_loss_fn(loss_fn)
    check_kind("train", train, bool)
    leaves, signature = flatten_batch(batch)
    buffers = dict(model.named_buffers())
    host = HostValues(leaves, signature, buffers.__getitem__).of()
    fn, specs = JointLoss(LossSource(model=model, loss_fn=loss_fn, train=train), signature, host)()
    reads = Reads(loss_fn, restore=True)
    with reads.seen():
        graph = capture_with(host, lambda: capture(fn, specs, keep=keeps_whole, explain=True))
    return Explanation(
        operators=_operators(graph),
        num_nodes=graph.num_nodes,
        closure=tuple(tuple(t.shape) for t in graph.closure),
        written=len(graph.written),
        unreached=tuple(map(str, graph.aux.without_grad)),
        skipped_checks=tuple(dict.fromkeys(graph.skipped)),
        random=draws_random(graph.module),
        frozen=reads.guard().frozen,
    )


def _operators(graph: Captured[LossShape]) -> tuple[Operator, ...]:
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    counts = collections.Counter(node.target for node in nodes)
    first = {node.target: node for node in reversed(nodes)}
    found = [Operator(str(op), count, _lowering_of(op), place_of(first[op])) for op, count in counts.items()]
    return tuple(sorted(found, key=lambda op: (op.lowering != "none", -op.count, op.name)))


def _lowering_of(op: torch._ops.OpOverload) -> str:
    if op in LOWERINGS:
        return "yours" if is_own(op) else "torch_shard"
    return "none" if find_lowering(op) is None else "torchax"
