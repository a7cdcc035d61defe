"""What a plan decided: the sharding of each entry, with the rule, the reason and the bytes; printed, a table."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from torch_shard._common.printed import InNotebooks, printed
from torch_shard._common.specs import describe_mesh, describe_spec
from torch_shard._sharding.activations import Constraint
from torch_shard._sharding.context import Context
from torch_shard._sharding.forms import Form, Kept, Padded
from torch_shard._sharding.pipeline import Pipeline, Stages
from torch_shard._sharding.stack_rows import stack_sharding
from torch_shard._sharding.stacked import Group, Layout


@dataclass(frozen=True)
class ResolvedEntry:
    """A plan's decision for one name.

    Attributes:
        shape: Global shape.
        dtype: As found, torch's or numpy's; None where only a shape was given.
        rule: The rule that decided, quoted, or `default`.
        sharding: The sharding, of what is stored if that is padded.
        tied_to: The first name of the same tensor, where this is another one.
        reason: Why the rule is as it is, if the plan says it.
        form: How a step stores it, if not in torch's form.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | np.dtype | None
    rule: str
    sharding: NamedSharding
    tied_to: str | None = None
    reason: str = ""
    form: Form | None = None

    @property
    def kept(self) -> Kept | None:
        """Its form for this shape."""
        return None if self.form is None else Kept(self.form, self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's shard."""
        return self.sharding.shard_shape(self.placed_shape)

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """Shape of what the sharding is of: with padding, if there is any."""
        return self.form.stored_shape(self.shape) if isinstance(self.form, Padded) else self.shape

    @property
    def padded_spec(self) -> PartitionSpec:
        """The spec with a part for each dim."""
        spec = self.sharding.spec
        return PartitionSpec(*spec, *[None] * (len(self.shape) - len(spec)))

    def count_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Count the bytes of `shape` in this entry's dtype; None if that is unknown."""
        return None if self.dtype is None else math.prod(shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedPlan(InNotebooks, Mapping[str, NamedSharding]):
    """Shardings by name, as `ShardingPlan.resolve` gives them; printed, a table with bytes per device.

    JAX takes plain dicts for trees: give it `dict(resolved)`. Sums of bytes take a tie once, and are
    None if a dtype is unknown.

    Attributes:
        mesh: The mesh of every sharding.
        entries: Shape, dtype, rule and sharding by name.
        activations: What it asks for of what modules take and return.
        context: Over which axis the sequence of the batch is split.
        pipeline: Over which axis the repeated layers are.
        stages: Which layers these are, once a step has looked for them.
    """

    mesh: Mesh
    entries: Mapping[str, ResolvedEntry]
    activations: tuple[Constraint, ...] = ()
    context: Context | None = None
    pipeline: Pipeline | None = None
    stages: Stages | None = None

    def __getitem__(self, name: str) -> NamedSharding:
        entry = self.entries[name]
        # Only what is padded has the sharding of what is stored: a spec of other forms is for torch's shape.
        if entry.kept and isinstance(entry.form, Padded):
            return entry.kept.restored_sharding(entry.sharding)
        return entry.sharding

    def stored(self, name: str) -> NamedSharding:
        """The sharding of an entry in the form in which a step keeps it."""
        entry = self.entries[name]
        return entry.sharding if entry.kept is None else entry.kept.stored_sharding(entry.sharding)

    def of_group(self, group: Group, layout: Layout) -> NamedSharding:
        """The sharding of what a layout stores for a group: an entry, or several as rows."""
        sharding = self.stored(group[0])
        if len(group) == 1:
            return sharding
        return stack_sharding(sharding, layout.axis_of(group))

    @property
    def kept(self) -> dict[str, Kept]:
        """By name, what is not kept in torch's form."""
        return {name: entry.kept for name, entry in self.entries.items() if entry.kept is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the whole."""
        return self._sum(lambda entry: entry.shape)

    @property
    def num_bytes_per_device(self) -> int | None:
        """Bytes that each device holds."""
        return self._sum(lambda entry: entry.local_shape)

    @property
    def fraction_replicated(self) -> float | None:
        """Share of the bytes that every device holds whole."""
        whole = self._sum(lambda entry: entry.shape if entry.sharding.is_fully_replicated else (0,))
        return None if whole is None else whole / max(self.num_bytes or 0, 1)

    def _sum(self, get_shape: Callable[[ResolvedEntry], tuple[int, ...]]) -> int | None:
        total = 0
        for entry in self.entries.values():
            if entry.tied_to:
                continue
            num_bytes = entry.count_bytes(get_shape(entry))
            if num_bytes is None:
                return None
            total += num_bytes
        return total

    def __repr__(self):
        return f"ResolvedPlan(num_names={len(self)}, mesh={describe_mesh(self.mesh)})"

    def __str__(self):
        return print_wide(self)

    def __rich__(self) -> Table:
        replicated = "-" if self.fraction_replicated is None else f"{self.fraction_replicated:.1%}"
        total = _describe_bytes(self.num_bytes)
        per_device = _describe_bytes(self.num_bytes_per_device)
        table = Table(
            title=f"ShardingPlan on mesh {describe_mesh(self.mesh)}",
            caption=f"total {total}, per device {per_device}, replicated {replicated}",
        )

        headings = ["name", "shape", "dtype", "rule", "spec", "local shape", "bytes per device"]
        has_reasons = any(entry.reason for entry in self.entries.values())
        has_forms = any(entry.form for entry in self.entries.values())
        if has_reasons:
            headings.append("why")
        if has_forms:
            headings.append("stored")
        for heading in headings:
            table.add_column(heading, overflow="fold", justify="right" if "bytes" in heading else "left")

        for name, entry in self.entries.items():
            dtype = "-" if entry.dtype is None else str(entry.dtype).removeprefix("torch.")
            num_bytes = _describe_bytes(entry.count_bytes(entry.local_shape))
            cells: list[object] = [
                name,
                entry.shape,
                dtype,
                entry.rule,
                describe_spec(entry.sharding.spec),
                entry.local_shape,
            ]
            cells.append(f"in {entry.tied_to}" if entry.tied_to else num_bytes)
            if has_reasons:
                cells.append(entry.reason)
            if has_forms:
                cells.append(entry.form or "")
            # As `Text`: rich would read the brackets of a shape as markup.
            table.add_row(*(Text(str(cell)) for cell in cells))

        for constraint in self.activations:
            spec = describe_spec(constraint.spec)
            cells = [constraint.place, "-", "-", f'"{constraint.rule}"', spec, "-", "-"]
            table.add_row(*(Text(str(cell)) for cell in cells))
        return table


def print_wide(table: RenderableType) -> str:
    """Text of what rich can print, so wide that no name is folded."""
    return printed(table, 10_000).rstrip("\n")


def _describe_bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else decimal(num_bytes)
