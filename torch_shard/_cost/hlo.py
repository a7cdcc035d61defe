"""The text of a compiled program, as instructions in computations."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torch_shard._common.expected_trips import expected_trips

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16}

_MOST_SOURCES = 30

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation|async_execution_thread_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a type.

    Attributes:
        dtype: As HLO writes it.
        shape: Its sizes.
        layout: What stands in braces behind it: order, tiles, memory space.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def bits(self) -> int:
        """Of one element."""
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        return _BITS.get(self.dtype, int(digits.group(1)) if digits else 32)

    @property
    def num_bytes(self) -> float:
        """Of its elements."""
        return self.bits / 8 * math.prod(self.shape)

    @property
    def num_padded_bytes(self) -> float:
        """With what the tiles of its layout add."""
        tile, order = re.search(r"T\((\d+(?:,\d+)*)\)", self.layout), re.match(r"[\d,]+", self.layout)
        if not tile or not order or not self.shape:
            return self.num_bytes
        sizes = list(self.shape)
        dims = [int(dim) for dim in order.group().split(",") if dim]
        for dim, size in zip(dims, [int(size) for size in tile.group(1).split(",")][::-1], strict=False):
            sizes[dim] = -(-sizes[dim] // size) * size
        return self.bits / 8 * math.prod(sizes)

    @property
    def is_on_host(self) -> bool:
        """Whether it lies in the host's memory."""
        return "S(5)" in self.layout

    @property
    def is_on_chip(self) -> bool:
        """Whether it lies beside the arithmetic units and not in the device's memory."""
        return re.search(r"S\([1-9]\)", self.layout) is not None


def arrays_of(text: str) -> list[Array]:
    """The arrays of a type, which may be a tuple."""
    return [Array(dtype, _shape(dims), layout) for dtype, dims, layout in _ARRAY.findall(text)]


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction.

    Attributes:
        name: Of its result.
        type: Of its result, as text.
        op: The operation.
        operands: Names of what it works on; of a parameter its number.
        attributes: All that stands behind the operands.
        is_root: Whether it is the result of its computation.
    """

    name: str
    type: str
    op: str
    operands: list[str]
    attributes: str
    is_root: bool

    @property
    def kind(self) -> str:
        """The operation, without what tells the parts of an asynchronous one apart."""
        return self.op.removesuffix("-start")

    @functools.cached_property
    def results(self) -> list[Array]:
        """The arrays of its result."""
        return arrays_of(self.type)

    @functools.cached_property
    def label(self) -> str:
        """Where JAX made it: the names of its scopes, from the outermost on."""
        return self.find(r'op_name="([^"]*)"') or ""

    def find(self, pattern: str) -> str | None:
        """The first group of a pattern in its attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


class Hlo:
    """A program.

    Args:
        text: As `jax.stages.Compiled.as_text()` gives it; no two instructions have one name.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self.made: dict[str, Instruction] = {}
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
                current = self.computations[head.group(2)] = []
                self.entry = head.group(2) if head.group(1) else self.entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                instruction = _parsed(found.group(2), found.group(3), is_root=bool(found.group(1)))
                current.append(instruction)
                self.made[instruction.name] = instruction

    def label(self, instruction: Instruction) -> str:
        """Its label, or that of what it works on where XLA has given it none, as when it combines several."""
        waiting, seen = [instruction], set[str]()
        while waiting and len(seen) < _MOST_SOURCES:
            current = waiting.pop(0)
            if "jit(" in current.label:
                return current.label
            seen.add(current.name)
            waiting += [self.made[name] for name in current.operands if name in self.made and name not in seen]
        return instruction.label

    def called(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction runs."""
        names = _CALLED.findall(instruction.attributes)
        for group in _BRANCHES.findall(instruction.attributes):
            names += re.findall(r"%?([\w.\-]+)", group)
        return [name for name in names if name in self.computations]

    def inner(self, instruction: Instruction) -> list[tuple[str, float]]:
        """The computations that a loop, a call or a branch runs, each with how often; none for what is one itself."""
        if instruction.op == "while":
            return [(instruction.find(r"body=%?([\w.\-]+)") or "", self.trips(instruction))]
        if instruction.op not in ("call", "conditional"):
            return []
        called = self.called(instruction)
        # branches that do the same count once
        return [(name, 1.0) for name in {self._steps(name): name for name in called[::-1]}.values()]

    def _steps(self, name: str) -> tuple[tuple[object, ...], ...]:
        return tuple((step.op, step.type, *map(self._steps, self.called(step))) for step in self.computations[name])

    def operand(self, name: str) -> list[Array]:
        """The arrays of the result of that name."""
        return self.made[name].results if name in self.made else []

    def trips(self, loop: Instruction) -> float:
        """How often the body of a loop runs, or is expected to."""
        if (known := loop.find(r'known_trip_count":\{"n":"(\d+)"')) is not None:
            return int(known)
        if (expected := expected_trips(loop.label)) is not None:
            return expected
        condition = self.computations.get(loop.find(r"condition=%?([\w.\-]+)") or "", [])
        limits = [i.operands[0] for i in condition if i.op == "constant" and i.operands and i.operands[0].isdecimal()]
        return max(map(int, limits), default=1)


def _parsed(name: str, rest: str, *, is_root: bool) -> Instruction:
    """An instruction of what stands behind its name: the type, the operation, what it works on, attributes."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")  # layouts have no blanks
    kind, rest = rest[:end], rest[end + 1 :]
    start = rest.index("(")
    end = _closing(rest, start)
    op, inner = rest[:start], rest[start + 1 : end]
    operands = [inner] if op in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", inner)
    return Instruction(name, kind, op, operands, rest[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return len(text)


# What the devices of a program tell each other: bytes that one of them receives.


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: One of `KINDS`.
        num_bytes: That a device receives, each time.
    """

    kind: str
    num_bytes: float


def collective_of(hlo: Hlo, instruction: Instruction, *, scatters: bool = False) -> Collective:
    """What a collective moves, by the best known way: a ring."""
    size = len(next(iter(members_of(group_of(instruction))), ()))  # 0 if that is not said
    share = (size - 1) / size if size else 1.0
    given = sum(array.num_bytes for name in instruction.operands for array in hlo.operand(name))
    results = sum(array.num_bytes for array in instruction.results)
    kind = instruction.kind
    if kind == "all-gather":
        results = max(results - given, 0) if instruction.op != kind else results  # a start gives its inputs, too
        return Collective(kind, results * share)
    if kind == "all-reduce":
        return Collective("reduce-scatter" if scatters else kind, (1 if scatters else 2) * given * share)
    return Collective(kind, given if kind == "collective-permute" else given * share)


def travelling(hlo: Hlo, instruction: Instruction) -> Iterator[tuple[Instruction, Collective]]:
    """The collectives that an instruction starts: itself, or those that are fused into it."""
    if instruction.kind in KINDS:
        yield instruction, collective_of(hlo, instruction)
    elif instruction.op in ("fusion", "async-start"):
        for called in hlo.called(instruction):
            scatters = "all-reduce-scatter" in called
            for inner in hlo.computations[called]:
                if inner.kind in KINDS:
                    is_scatter = scatters and inner.op == "all-reduce"
                    yield inner, collective_of(hlo, inner, scatters=is_scatter)
                elif inner.op == "fusion":
                    yield from travelling(hlo, inner)


def between_slices(instruction: Instruction) -> float:
    """Bytes that a device receives from other TPU slices by this instruction, over the slower network.

    For that network XLA:TPU makes of each collective one within the slices, and a transfer of the host's.
    """
    target = instruction.find(r'_xla_megascale_target="\{([\d,]+)\}')
    if instruction.op != "recv" or target is None:
        return 0.0
    num, size = len(target.split(",")), instruction.results[0].num_bytes
    shares = {"ALL_GATHER": 1 - 1 / num, "ALL_REDUCE": 2 * (1 - 1 / num), "REDUCE_SCATTER": num - 1.0}
    return size * shares.get(instruction.find(r'_xla_megascale_transfer_type="(\w+)"') or "", 1.0)


def identity(instruction: Instruction) -> tuple[str | None, ...]:
    """The same for the parts of one collective that was cut into a chain.

    A channel alone does not tell: all collectives of a `jax.shard_map` share one.
    """
    if chain := instruction.find(r'chain_id="(\d+)"'):
        return instruction.op, "chain", chain, instruction.find(r"channel_id=(\d+)")
    return instruction.op, instruction.name


_MESH = r"mesh\[([^\]]*)\](?:, device_ids=(\([^{]*\)))?\s*\{([^}]*)\}"


def group_of(instruction: Instruction) -> str:
    """Which devices a collective is between, as HLO writes it."""
    lists = r"\{(?:\{[\d,]*\},?)*\}"
    ways = rf"{_MESH}|{lists}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    return instruction.find(rf"((?:replica_groups|source_target_pairs)=(?:{ways}))") or ""


def axes_of_group(group: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which devices of a group differ; all where that is not said.

    Args:
        group: Of `group_of`.
        sizes: Of the mesh's axes, in order.
    """
    groups = members_of(group)
    if not groups or math.prod(sizes.values()) <= max(map(max, groups)):
        return tuple(axis for axis, size in sizes.items() if size > 1)
    places = [np.unravel_index(ids, tuple(sizes.values())) for ids in groups]
    return tuple(axis for at, axis in enumerate(sizes) if any(len(set(place[at].tolist())) > 1 for place in places))


def members_of(group: str) -> list[list[int]]:
    """Devices of the first group of `group_of`, or of all; of pairs, all."""
    if found := re.search(_MESH, group):
        return [_of_mesh(*found.groups())]
    if found := re.search(r"=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", group):
        return [_iota(found.group(2), found.group(3)).reshape(_numbers(found.group(1)))[0].tolist()]
    return [_numbers(text) for text in re.findall(r"\{(\d[\d,]*)\}", group)]


def _of_mesh(shape: str, ids: str | None, axes: str) -> list[int]:
    """The first group of a mesh that XLA has named for itself: along these axes, or parts of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", shape)}
    order = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids or "")
    devices = np.arange(math.prod(sizes.values())) if order is None else _iota(*order.groups())
    devices, chosen = devices.reshape(tuple(sizes.values())), dict[str, Any]()
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        step = sizes[name] // int(before) // int(part) if part else 1
        chosen.setdefault(name, []).append(np.arange(int(part or sizes[name])) * step)
    at = [functools.reduce(np.add.outer, chosen[name]).ravel() if name in chosen else [0] for name in sizes]
    return devices[np.ix_(*at)].ravel().tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order) if order else None).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
