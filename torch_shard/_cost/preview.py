"""What a step would take of each device, known before anything runs: memory, collectives, arithmetic, by module."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torch_shard._common.host_memory import is_pinned
from torch_shard._common.printed import InNotebooks, printed
from torch_shard._common.specs import describe_mesh, slices_of
from torch_shard._common.types import PyTree
from torch_shard._cost.chips import chip_of
from torch_shard._cost.exposed import exposed_by_axis
from torch_shard._cost.fitting import TooLarge, compile_or_refuse, memory_of_program, saved_bytes
from torch_shard._cost.hlo import KINDS
from torch_shard._cost.total import COMPILER, Cost, ModuleCost, ModulePaths, costs_of
from torch_shard._sharding import ResolvedPlan, memory_of

_SHOWN = 24
"""Modules in a table."""

_WIDEST = 8
"""Values, parameters and modules of which most is said."""


@dataclasses.dataclass(frozen=True)
class PreviewMemory:
    """Bytes of one device while a program runs.

    Attributes:
        parameters: Trainable ones.
        moments: The optimiser's state.
        frozen: Parameters that are not trained.
        buffers: Of the model.
        batch: And what else the program is given.
        saved: Values that the forward pass leaves for the backward pass.
        temporaries: All others that are made on the way.
        peak: Everything together, what is donated counted once; for TPUs by their compiler's own account.
        host: Bytes in the host's memory for this device, which are in none of the others (`offload=`).
    """

    parameters: int
    moments: int
    frozen: int
    buffers: int
    batch: int
    saved: int
    temporaries: int
    peak: int
    host: int = 0


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Preview(InNotebooks):
    """The memory, collectives and arithmetic of a step on each device; printed, tables. From `step.preview`.

    Attributes:
        mesh: The mesh, as text.
        memory: By part.
        limit: Bytes that a program of one such device may have; None if that is not known.
        modules: What each module costs.
        widest: The largest values: bytes, what they are, and of which module.
        replicated: Parameters that lie whole on each device, though the mesh could split them: name and bytes.
        compiled: JAX's own compiled program; None if it does not fit.
        refused: What the compiler said where it does not fit; else empty.
        notes: What `step.report()` says of the program: which layers are loops, which attention has no kernel.
        exposed: Cycles in which a TPU waits for other devices: communication that the compiler's schedule does not
            hide behind arithmetic, at the published speed of the links. None where that is not known.
        exposed_by_axis: The same by axis of the mesh; by two, `"batch, model"`, where devices of both take part.
        between_slices: Bytes that one device receives from other TPU slices, over the slower network, which are not in
            `collective_bytes`; None where all devices are of one slice.
        host_bytes: That one device brings in from the host's memory and sends there.
        host_seconds: What the transfers between host and device take by themselves, at the published speed of the link;
            None where that is not known. Some of them are hidden behind arithmetic.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(64, 32), lambda model, batch: model(batch).square().mean(), optax.adam(0.1),
        ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> preview = step.preview(torch.empty(8, 64, device="meta"))
        >>> preview.memory.parameters, preview.memory.moments, preview.collectives["all-reduce"] > 0
        (8320, 16644, True)
        >>> preview.assert_at_most(memory=1_000_000, all_gathers=0)
    """

    mesh: str
    memory: PreviewMemory
    limit: int | None
    modules: tuple[ModuleCost, ...]
    widest: tuple[tuple[int, str, str], ...]
    replicated: tuple[tuple[str, int], ...]
    compiled: jax.stages.Compiled | None
    refused: str = ""
    notes: tuple[str, ...] = ()
    exposed: int | None = None
    exposed_by_axis: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    between_slices: int | None = None
    host_bytes: int = 0
    host_seconds: float | None = None

    @property
    def collectives(self) -> dict[str, int]:
        """Number of collectives of each kind; those in a loop count each time."""
        return {kind: sum(module.collectives.get(kind, 0) for module in self.modules) for kind in KINDS}

    @property
    def collective_bytes(self) -> int:
        """Bytes that one device receives from others in a step."""
        return self._sum("received_bytes")

    @property
    def flops(self) -> int:
        """Of products, on one device."""
        return self._sum("flops")

    @property
    def memory_bytes(self) -> int:
        """Read from one device's memory and written to it."""
        return self._sum("memory_bytes")

    @property
    def cycles(self) -> int:
        """XLA:TPU's own estimate, without communication; of kernels written in Pallas ours. Zero on other devices."""
        return self._sum("cycles")

    def _sum(self, name: str) -> int:
        return int(sum(getattr(module, name) for module in self.modules))

    @property
    def attributed(self) -> float:
        """The part of `collective_bytes` whose module is known."""
        of_compiler = [module for module in self.modules if module.path == COMPILER]
        unknown = sum(module.received_bytes for module in of_compiler)
        return 1 - unknown / max(self.collective_bytes, 1)

    def fits(self, hbm_bytes: float | None = None) -> bool:
        """Tell whether the program fits into a device.

        Args:
            hbm_bytes: Its memory; by default that of the mesh's devices.

        Raises:
            ValueError: That is not known.
        """
        limit = self.limit if hbm_bytes is None else hbm_bytes
        if limit is None:
            raise ValueError("fits: the memory of these devices is not known. Give it: preview.fits(80e9).")
        return self.memory.peak <= limit

    def assert_at_most(
        self,
        *,
        memory: float | None = None,
        collective_bytes: float | None = None,
        all_gathers: int | None = None,
        all_reduces: int | None = None,
        reduce_scatters: int | None = None,
        all_to_alls: int | None = None,
        cycles: float | None = None,
        exposed: float | None = None,
        between_slices: float | None = None,
    ) -> None:
        """Refuse a step that takes more than a budget, for a user's own tests.

        Args:
            memory: Bytes of one device at the peak.
            collective_bytes: Bytes that one device receives in a step.
            all_gathers: Number of collectives, those in a loop counted each time, as for the next three.
            all_reduces: See there.
            reduce_scatters: See there.
            all_to_alls: See there.
            cycles: By the TPU compiler's estimate.
            exposed: Cycles in which a TPU waits for other devices.
            between_slices: Bytes that one device receives from other slices.

        Raises:
            AssertionError: It takes more; the modules that take most of it are named, and parameters that are not
                split.
        """
        numbers = self.collectives
        kinds = {
            "all-gather": all_gathers,
            "all-reduce": all_reduces,
            "reduce-scatter": reduce_scatters,
            "all-to-all": all_to_alls,
        }
        budgets = [
            ("bytes of memory", memory, self.memory.peak, None),
            ("bytes of collectives", collective_bytes, self.collective_bytes, _by_received),
            *((f"{kind}s", most, numbers[kind], _by_kind(kind)) for kind, most in kinds.items()),
            ("cycles", cycles, self.cycles, _by_cycles),
            ("cycles of communication that is waited for", exposed, self.exposed or 0, _by_received),
            ("bytes between slices", between_slices, self.between_slices or 0, None),
        ]
        lines = list[str]()
        for what, most, value, measure in budgets:
            if most is not None and value > most:
                lines.append(f"{value:,} {what}, at most {most:,.0f} allowed. Most of it: {self._most(measure)}.")
        if not lines:
            return

        whole = ", ".join(f"{name} ({size:,} bytes)" for name, size in self.replicated[:_WIDEST])
        if whole:
            lines.append(f"Not split by the plan, though the mesh could: {whole}.")
        raise AssertionError(f"The step on {self.mesh} takes more than its budget:\n  " + "\n  ".join(lines))

    def _most(self, measure: Callable[[ModuleCost], float] | None) -> str:
        """What takes most of it: the heaviest modules, or of memory the largest parts."""
        if measure is None:
            sizes = {name: size for name, size in dataclasses.asdict(self.memory).items() if name != "peak" and size}
            ordered = sorted(sizes.items(), key=operator.itemgetter(1), reverse=True)
            shown = ", ".join(f"{name} {size:,}" for name, size in ordered)
            widest = "; ".join(f"{what} of {path}, {size:,}" for size, what, path in self.widest[:3])
            return f"{shown}; the largest values: {widest}" if widest else shown

        heaviest = sorted(self.modules, key=measure, reverse=True)[:_WIDEST]
        parts = [f"{module.path} {measure(module):,.0f}" for module in heaviest if measure(module)]
        return ", ".join(parts) or "none"

    def __rich__(self) -> Group:
        parts = [self._memory_table()]
        if self.compiled is not None:
            parts.append(self._collectives_table())
            parts.append(self._modules_table())
            values = [(what, _size(size), path) for size, what, path in self.widest]
            parts.append(_table("The largest values", "value", "size", "module", rows=values))
        if self.replicated:
            title = "Whole on each device, though the mesh could split them"
            values = [(name, _size(size)) for name, size in self.replicated[:_WIDEST]]
            parts.append(_table(title, "parameter", "size", rows=values))
        return Group(*parts, *map(Text, self.notes))

    def __str__(self) -> str:
        return printed(self, 132)

    def _memory_table(self) -> Table:
        table = _table(f"Memory of one device, {self.mesh}", "part", "size")
        for name, size in dataclasses.asdict(self.memory).items():
            if name not in ("peak", "host") and size:
                table.add_row(name, _size(size))

        table.add_section()
        room = ""
        if self.limit is not None:
            room = f" of {_size(self.limit)}: {'fits' if self.fits() else 'does not fit'}"
        table.add_row("peak", f"{_size(self.memory.peak)}{room}")
        if self.memory.host:
            seconds = "" if self.host_seconds is None else f", {self.host_seconds:.2f} s at the speed of the link"
            table.add_row("in the host's memory", _size(self.memory.host))
            table.caption = f"{_size(self.host_bytes)} go to the host and come back in a step{seconds}"
        table.caption = self.refused or table.caption
        return table

    def _collectives_table(self) -> Table:
        table = _table("Collectives of one step", "kind", "number", "received")
        for kind, number in self.collectives.items():
            if number:
                received = sum(module.received.get(kind, 0) for module in self.modules)
                table.add_row(kind, f"{number:,}", _size(received))
        table.add_section()
        table.add_row("all", f"{sum(self.collectives.values()):,}", _size(self.collective_bytes))
        if self.between_slices is not None:
            table.add_row("between slices", "", _size(self.between_slices))
        if self.exposed:
            share = self.exposed / (self.cycles + self.exposed)
            axes = ", ".join(f"{axis} {cycles / 1e6:.1f}" for axis, cycles in self.exposed_by_axis.items() if cycles)
            waited = f"{self.exposed / 1e6:.1f} Mcycles of them are waited for"
            table.caption = f"{waited}, {share:.0%} of the step's; by axis: {axes}"
        return table

    def _modules_table(self) -> Table:
        has_cycles = bool(self.cycles)
        columns = ["module", "Mcycles", "Gflop", "memory traffic", "received", "collectives", "constrained"]
        if not has_cycles:
            columns.remove("Mcycles")
        table = _table("By module, forward and backward", *columns)

        measure = operator.attrgetter("cycles" if has_cycles else "memory_bytes", "received_bytes")
        ordered = sorted(self.modules, key=measure, reverse=True)
        for module in ordered[:_SHOWN]:
            row = [module.path]
            if has_cycles:
                row.append(f"{module.cycles / 1e6:.1f}")
            row += [f"{module.flops / 1e9:.1f}", _size(module.memory_bytes), _size(module.received_bytes)]
            row.append(", ".join(f"{number} {kind}" for kind, number in module.collectives.items()))
            # What is constrained says where collectives come from, and nothing where there are none.
            row.append("; ".join(module.constrained) if module.collectives else "")
            table.add_row(*row)
        if len(ordered) > _SHOWN:
            table.caption = f"and {len(ordered) - _SHOWN} more"
        return table


def preview_of(
    lowered: jax.stages.Lowered,
    state: Any,
    arrays: Iterable[PyTree],
    *,
    plan: ResolvedPlan,
    paths: Iterable[str],
    notes: Iterable[str],
    why: Callable[[str], tuple[str, ...]],
) -> Preview:
    """Compile a step and read what it takes.

    Args:
        lowered: The step.
        state: A `TrainState` of structs, which it takes.
        arrays: Structs of the batch.
        plan: How the entries of the model are split.
        paths: Of its modules.
        notes: What else there is to say.
        why: Gives the reasons for which values of a module are constrained.
    """
    arguments = {
        "parameters": _bytes_of(state.params),
        "moments": _bytes_of(state.opt_state),
        "frozen": _bytes_of(state.frozen),
        "buffers": _bytes_of(state.buffers),
        "batch": _bytes_of(list(arrays)),
    }
    device = plan.mesh.devices.flat[0]
    known: dict[str, Any] = {
        "mesh": f"{describe_mesh(plan.mesh)} of {getattr(device, 'device_kind', device.platform)}",
        "limit": memory_of(device),
        "replicated": tuple(_replicated(plan)),
        "notes": tuple(notes),
    }

    compiled = compile_or_refuse(lowered)
    if isinstance(compiled, TooLarge):
        size = sum(arguments.values())
        needed = compiled.num_bytes or size
        memory = PreviewMemory(**arguments, saved=0, temporaries=max(needed - size, 0), peak=needed)
        return Preview(**known, memory=memory, modules=(), widest=(), compiled=None, refused=compiled.message)

    text = compiled.as_text() or ""
    program = memory_of_program(compiled, device.platform)
    # Values that are saved may share memory, so that they can seem to be more than all temporaries together.
    saved = min(int(saved_bytes(text)), program.temporaries)
    temporaries = program.temporaries - saved
    memory = PreviewMemory(**arguments, saved=saved, temporaries=temporaries, peak=program.peak, host=program.host)

    chip = chip_of(device)
    costs = costs_of(text, chip)
    modules = ModulePaths(paths)
    waited = exposed_by_axis(text, plan.mesh)
    host_bytes = int(sum(cost.host_bytes for cost in costs))
    has_slices = len(set(slices_of(plan.mesh))) > 1
    return Preview(
        **known,
        memory=memory,
        modules=tuple(modules.by_module(costs, why)),
        widest=tuple(_widest(costs, modules)),
        compiled=compiled,
        exposed=None if waited is None else sum(waited.values()),
        exposed_by_axis=waited or {},
        between_slices=int(sum(cost.between_slices for cost in costs)) if has_slices else None,
        host_bytes=host_bytes,
        host_seconds=None if chip.host_link is None else host_bytes / chip.host_link,
    )


def _bytes_of(tree: PyTree) -> int:
    """Bytes of the arrays of a tree in one device's own memory."""
    leaves: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if not is_pinned(leaf.sharding)]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _replicated(plan: ResolvedPlan) -> list[tuple[str, int]]:
    """Matrices and larger that are not split, though a dim divides by a mesh axis; the largest first."""
    axis_sizes = [size for size in plan.mesh.shape.values() if size > 1]
    whole = list[tuple[str, int]]()
    for name, entry in plan.entries.items():
        divides = any(dim % size == 0 for dim in entry.shape for size in axis_sizes)
        is_whole = entry.local_shape == entry.shape
        if entry.tied_to is None and len(entry.shape) > 1 and divides and is_whole:
            whole.append((name, entry.count_bytes(entry.shape) or 0))
    return sorted(whole, key=operator.itemgetter(1), reverse=True)


def _widest(costs: Iterable[Cost], modules: ModulePaths) -> list[tuple[int, str, str]]:
    # The layers of a model have values alike, which are one row.
    sizes = dict[tuple[str, str], int]()
    for cost in costs:
        size, what = cost.largest
        if what:
            sizes[what, modules.find(cost.label)] = int(size)
    ordered = sorted(sizes.items(), key=operator.itemgetter(1), reverse=True)
    return [(size, what, path) for (what, path), size in ordered[:_WIDEST]]


def _table(title: str, *columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        is_text = column in ("part", "kind", "module", "collectives", "value", "parameter", "constrained")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _size(num_bytes: float) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.2f} {unit}"
    return f"{num_bytes:.0f} B"


_by_received, _by_cycles = operator.attrgetter("received_bytes"), operator.attrgetter("cycles")


def _by_kind(kind: str) -> Callable[[ModuleCost], float]:
    return lambda module: module.collectives.get(kind, 0)
