"""What one run of a compiled program communicates, read from its HLO."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

_WIRE: dict[str, Callable[[float, int], float]] = {
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all-gather": lambda size, n: size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
}
"""Bytes that a device sends, from those of the result and the size of the group: a ring, where there is a choice."""

_BYTES = {"f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "pred": 1, "s64": 8, "u64": 8, "f64": 8, "s8": 1, "u8": 1}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_WIRE)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_CHOSEN_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, per device and run.

    Attributes:
        count: How many run.
        num_bytes: Bytes of their results.
        wire_bytes: Bytes that the device sends, by a ring.
    """

    count: int = 0
    num_bytes: int = 0
    wire_bytes: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.num_bytes + other.num_bytes, self.wire_bytes + other.wire_bytes)


def collectives(hlo: str, num_devices: int) -> dict[str, Traffic]:
    """Collectives of a compiled program, by kind; those within a loop count once per iteration.

    Args:
        hlo: `compiled.as_text()`.
        num_devices: Of the mesh: the group of a collective that names no groups.

    Returns:
        Totals by kind. Of a conditional, all branches count.

    Raises:
        ValueError: A collective runs within a loop whose number of iterations XLA does not know.
    """
    computations = _computations(hlo)
    found: dict[str, Traffic] = collections.defaultdict(Traffic)
    for name, times in _runs(computations).items():
        for kind, one in _traffic(computations[name][1], num_devices):
            if math.isnan(times):
                raise ValueError(f"{kind} in {name} runs in a loop with an unknown number of iterations.")
            found[kind] += Traffic(int(times), one.num_bytes * int(times), one.wire_bytes * times)
    return dict(sorted(found.items()))


def _computations(hlo: str) -> dict[str, tuple[bool, list[str]]]:
    """Name -> whether it is the entry, and its lines."""
    found: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            lines = []
            found[header[2]] = (header[1] is not None, lines)
        else:
            lines.append(line)
    return found


def _runs(computations: dict[str, tuple[bool, list[str]]]) -> dict[str, float]:
    """How often each computation runs; nan for those within a loop of unknown length."""
    runs: dict[str, float] = collections.defaultdict(float)

    def visit(name: str, times: float) -> None:
        runs[name] += times
        for line in computations[name][1]:
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += re.findall(r"[\w.\-]+", branches)
            trips = _TRIPS.search(line) if " while(" in line else None
            each = 1.0 if " while(" not in line else float(trips[1]) if trips else math.nan
            for callee in called:
                if callee in computations:
                    visit(callee, times * each)

    for name, (is_entry, _) in computations.items():
        if is_entry:
            visit(name, 1)
    return runs


def _traffic(lines: list[str], num_devices: int) -> Iterator[tuple[str, Traffic]]:
    for line in lines:
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        shapes, kind, is_start = match.groups()
        sizes = [_num_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(shapes)]
        if is_start and kind != "all-reduce":  # its type has the operands as well, before the results
            sizes = sizes[len(sizes) // 2 :]
        yield kind, Traffic(1, sum(sizes), wire_bytes(kind, sum(sizes), _group_size(line, num_devices)))


def _group_size(line: str, num_devices: int) -> int:
    """How many devices take part; XLA prints groups in three ways."""
    if listed := _LISTED_GROUPS.search(line):
        return len(listed[1].split(","))
    if counted := _COUNTED_GROUPS.search(line):
        return int(counted[1])
    if mesh := _MESH_GROUPS.search(line):
        axes = dict(_MESH_AXIS.findall(mesh[1]))
        return math.prod(int(part or axes[axis]) for axis, part in _CHOSEN_AXIS.findall(mesh[2]))
    return num_devices


def _num_bytes(dtype: str, dims: str) -> int:
    return _BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d])) if dtype in _BYTES else 0


def wire_bytes(kind: str, num_bytes: float, group_size: int) -> float:
    """Bytes that a device sends in a collective with a result of `num_bytes`, by a ring."""
    return _WIRE[kind](num_bytes, group_size)


def total(found: dict[str, Traffic]) -> Traffic:
    """All kinds together."""
    return sum(found.values(), Traffic())


def describe(found: dict[str, Traffic]) -> str:
    """Collectives as text: `26 all-reduce 17.2 MB`."""
    return ", ".join(f"{t.count} {kind} {t.num_bytes / 1e6:.3g} MB" for kind, t in found.items()) or "none"
