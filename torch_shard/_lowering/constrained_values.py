"""Which values of a program are constrained to lie in some way, and why: what a step says when it is asked."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec
from rich import box
from rich.table import Table
from torch.fx import GraphModule, Node

from torch_shard._common.fx import notes_of, operator_name, shape_of, sources_of
from torch_shard._common.printed import InNotebooks, printed, starred
from torch_shard._lowering.constraints import RESULT, Constraint, constraints_of
from torch_shard._lowering.rows import RowSplit


@dataclasses.dataclass(frozen=True)
class ConstrainedValue:
    """A value of a program that a step lays out on the mesh, where the compiler might do otherwise.

    Attributes:
        module: The path of the module that computes it, `layers.*` where several layers do; empty for the loss's own.
        value: What it is: the result of an operator (`mm`), or what an operator takes (`view takes add`), or an
            activation that the plan has a rule for.
        shape: Its global shape.
        spec: How it lies; `PartitionSpec.UNCONSTRAINED` where the compiler chooses.
        why: The reason.
        is_backward: Whether it belongs to the backward pass.
        count: How many such values there are.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> spec = P("batch", P.UNCONSTRAINED, None)
        >>> ConstrainedValue("layers.*", "mm", (8, 4, 2), spec, "rows stay split", is_backward=False).axes
        '0: batch, 2: whole'
    """

    module: str
    value: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    why: str
    is_backward: bool
    count: int = 1

    @property
    def axes(self) -> str:
        """The constrained dims, each with its axes, as `0: batch, 2: whole`."""
        # A spec may be shorter than the shape.
        parts = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        constrained: list[str] = []
        for dim, part in enumerate(parts):
            if part is not PartitionSpec.UNCONSTRAINED:
                constrained.append(f"{dim}: {_axes(part)}")
        return ", ".join(constrained)


@dataclasses.dataclass(frozen=True, repr=False)
class ConstrainedValues(InNotebooks):
    """The values that a program lays out on the mesh, by module; printed, a table. From `step.constraints(batch)`.

    All other values lie as the compiler chooses; parameters, their gradients and moments lie as the plan says.

    Attributes:
        values: In the order in which they are computed.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Sequential(torch.nn.Linear(8, 4)), lambda model, batch: model(batch).square().mean(),
        ...     optax.sgd(0.1), mesh=ts.make_mesh(batch=2),
        ...     plan=ts.ShardingPlan({"0.weight": P(None, "batch")}, default=P()),
        ... )
        >>> step.constraints(torch.empty(8, 8, device="meta")).why("0")
        ('rows stay split',)
    """

    values: tuple[ConstrainedValue, ...]

    def of(self, module: str) -> tuple[ConstrainedValue, ...]:
        """Those of a module, and of the modules in it.

        Args:
            module: Its path, with numbers (`layers.3.mlp`) or as it is shown (`layers.*.mlp`).
        """
        paths = (module, starred(module))
        prefixes = tuple(f"{path}." for path in paths)
        return tuple(value for value in self.values if value.module in paths or value.module.startswith(prefixes))

    def why(self, module: str) -> tuple[str, ...]:
        """The reasons for which values of a module itself are constrained.

        Args:
            module: Its path.
        """
        paths = (module, starred(module))
        reasons = [value.why for value in self.values if value.module in paths]
        return tuple(dict.fromkeys(reasons))

    def __rich__(self) -> Table:
        title = "Constrained values, by module"
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for column in ("module", "value", "shape", "dims", "why"):
            table.add_column(column, overflow="fold")
        for value in self.values:
            what = value.value
            if value.is_backward:
                what += " (backward)"
            if value.count > 1:
                what += f", {value.count} times"
            table.add_row(value.module or "(loss)", what, str(value.shape), value.axes, value.why)
        return table

    def __str__(self) -> str:
        return printed(self, 132)


def constrained_values(graphs: Iterable[tuple[str, GraphModule]], split: RowSplit | None) -> ConstrainedValues:
    """Those of the graphs of a program, each with the path of its module."""
    # Layers that are alike, up to their number, are one line.
    modules_of_value: dict[ConstrainedValue, list[str]] = {}
    for path, graph in graphs:
        for node in graph.graph.nodes:
            for place, constraints in sorted(constraints_of(node, split).items()):
                for constraint in constraints:
                    value = _value(path, node, place, constraint)
                    alike = dataclasses.replace(value, module=starred(value.module))
                    modules_of_value.setdefault(alike, []).append(value.module)

    values: list[ConstrainedValue] = []
    for value, modules in modules_of_value.items():
        module = value.module if len(set(modules)) > 1 else modules[0]
        values.append(dataclasses.replace(value, module=module, count=len(modules)))
    return ConstrainedValues(tuple(sorted(values, key=lambda value: value.is_backward)))


def _value(path: str, node: Node, place: int, constraint: Constraint) -> ConstrainedValue:
    notes = notes_of(node)
    tensor = node
    what = _name(node)
    if place != RESULT:
        tensor = sources_of(node)[place]
        what += f" takes {_name(tensor)}"
    return ConstrainedValue(
        module=".".join(filter(None, (path, notes.get("module")))),
        value=what,
        shape=shape_of(tensor),
        spec=constraint.spec,
        why=constraint.why,
        is_backward=notes.get("pass") == "backward",
    )


def _name(node: Node) -> str:
    name = operator_name(node)
    if name == "constrained":
        return "activation"
    # An input of the program has no operator, nor has a part of what an operator gives.
    return name or ("an input" if node.op == "placeholder" else "a part")


def _axes(part: Any) -> str:
    if part is None or part == ():
        return "whole"
    return part if isinstance(part, str) else "x".join(part)
