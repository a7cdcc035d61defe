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
        tile = re.search(r"T\((\d+(?:,\d+)*)\)", self.layout)
        order = re.match(r"[\d,]+", self.layout)
        if not tile or not order or not self.shape:
            return self.num_bytes

        # A layout lists the dims from the fastest on, `{1,0:T(8,128)}`; a tile has the fastest last.
        minor_to_major = [int(dim) for dim in order.group().split(",") if dim]
        tile_sizes = [int(size) for size in tile.group(1).split(",")]
        padded_shape = list(self.shape)
        for dim, tile_size in zip(minor_to_major, reversed(tile_sizes), strict=False):
            num_tiles = math.ceil(padded_shape[dim] / tile_size)
            padded_shape[dim] = num_tiles * tile_size
        return self.bits / 8 * math.prod(padded_shape)

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
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None


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
            # A computation begins at the margin, its instructions are indented. To ask the first letter spares most of
            # the lines of a large program a search.
            head = _HEAD.match(line) if line[:1] not in (" ", "}", "") else None
            if head is not None:
                is_entry, name = head.groups()
                current = self.computations[name] = []
                if is_entry:
                    self.entry = name
                continue

            if current is None:
                continue
            match = _INSTRUCTION.match(line)
            if match is not None:
                is_root, name, rest = match.groups()
                instruction = _parsed(name, rest, is_root=bool(is_root))
                current.append(instruction)
                self.made[name] = instruction

    def label(self, instruction: Instruction) -> str:
        """Its label, or that of what it works on where XLA has given it none, as when it combines several."""
        waiting = [instruction]
        seen = set[str]()
        while waiting and len(seen) < _MOST_SOURCES:
            current = waiting.pop(0)
            if "jit(" in current.label:
                return current.label
            seen.add(current.name)
            for name in current.operands:
                if name in self.made and name not in seen:
                    waiting.append(self.made[name])
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
            body = instruction.find(r"body=%?([\w.\-]+)") or ""
            return [(body, self.trips(instruction))]
        if instruction.op not in ("call", "conditional"):
            return []

        # Each device takes one branch: of those that do the same work one counts. Branches that differ all count.
        by_steps = {self._steps(name): name for name in reversed(self.called(instruction))}
        return [(name, 1.0) for name in by_steps.values()]

    def _steps(self, name: str) -> tuple[tuple[object, ...], ...]:
        steps = list[tuple[object, ...]]()
        for step in self.computations[name]:
            called = map(self._steps, self.called(step))
            steps.append((step.op, step.type, *called))
        return tuple(steps)

    def operand(self, name: str) -> list[Array]:
        """The arrays of the result of that name."""
        return self.made[name].results if name in self.made else []

    def trips(self, loop: Instruction) -> float:
        """How often the body of a loop runs, or is expected to."""
        known = loop.find(r'known_trip_count":\{"n":"(\d+)"')
        if known is not None:
            return int(known)
        expected = expected_trips(loop.label)
        if expected is not None:
            return expected

        # Without a count of XLA's, the limit is the largest number that the condition compares with.
        condition = self.computations.get(loop.find(r"condition=%?([\w.\-]+)") or "", [])
        limits = list[int]()
        for instruction in condition:
            if instruction.op == "constant" and instruction.operands and instruction.operands[0].isdecimal():
                limits.append(int(instruction.operands[0]))
        return max(limits, default=1)


def _parsed(name: str, rest: str, *, is_root: bool) -> Instruction:
    """An instruction of what stands behind its name: the type, the operation, what it works on, attributes."""
    # A tuple's type has blanks and brackets of its own; that of an array, with its layout, has none.
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result_type = rest[:type_end]
    rest = rest[type_end + 1 :]

    start = rest.index("(")
    end = _closing(rest, start)
    op = rest[:start]
    inner = rest[start + 1 : end]
    # In the brackets of a parameter stands its number, in those of a constant its value.
    operands = [inner] if op in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", inner)
    return Instruction(name, result_type, op, operands, rest[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
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
    """What a collective moves, by the best known way: a ring.

    Args:
        hlo: The program.
        instruction: The collective.
        scatters: Whether each device keeps a part of the sum alone: XLA:TPU writes an all-reduce in a fusion with that
            name, and sends as a reduce-scatter does.
    """
    group = next(iter(members_of(group_of(instruction))), ())  # empty if the devices are not said
    # In a ring of n devices each receives n - 1 of n parts.
    share = (len(group) - 1) / len(group) if group else 1.0
    operand_bytes = sum(array.num_bytes for name in instruction.operands for array in hlo.operand(name))
    result_bytes = sum(array.num_bytes for array in instruction.results)

    kind = instruction.kind
    match kind:
        case "all-gather":
            # The result of an `all-gather-start` is a tuple that has its inputs, too.
            if instruction.op != kind:
                result_bytes = max(result_bytes - operand_bytes, 0)
            return Collective(kind, result_bytes * share)
        case "all-reduce" if scatters:
            return Collective("reduce-scatter", operand_bytes * share)
        case "all-reduce":
            return Collective(kind, 2 * operand_bytes * share)
        case "collective-permute":
            return Collective(kind, operand_bytes)
        case _:
            return Collective(kind, operand_bytes * share)


def travelling(hlo: Hlo, instruction: Instruction) -> Iterator[tuple[Instruction, Collective]]:
    """The collectives that an instruction starts: itself, or those that are fused into it."""
    if instruction.kind in KINDS:
        yield instruction, collective_of(hlo, instruction)
        return
    if instruction.op not in ("fusion", "async-start"):
        return
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
    num_slices = len(target.split(","))
    shares = {
        "ALL_GATHER": 1 - 1 / num_slices,
        "ALL_REDUCE": 2 * (1 - 1 / num_slices),
        "REDUCE_SCATTER": num_slices - 1.0,
    }
    kind = instruction.find(r'_xla_megascale_transfer_type="(\w+)"') or ""
    return instruction.results[0].num_bytes * shares.get(kind, 1.0)


def identity(instruction: Instruction) -> tuple[str | None, ...]:
    """The same for the parts of one collective that was cut into a chain.

    A channel alone does not tell: all collectives of a `jax.shard_map` share one.
    """
    chain = instruction.find(r'chain_id="(\d+)"')
    if chain is not None:
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

    # The number of a device in a program is its place in the mesh, row by row.
    coordinates = [np.unravel_index(ids, tuple(sizes.values())) for ids in groups]
    differing = list[str]()
    for number, axis in enumerate(sizes):
        if any(len(set(along[number].tolist())) > 1 for along in coordinates):
            differing.append(axis)
    return tuple(differing)


def members_of(group: str) -> list[list[int]]:
    """Devices of the first group of `group_of`, or of all; of pairs, all."""
    # Three ways to write a group: of a mesh (Shardy's), of numbers in order that are reshaped and transposed
    # (`[2,4]<=[4,2]T(1,0)`, the "iota" form), and as lists.
    of_mesh = re.search(_MESH, group)
    if of_mesh is not None:
        return [_of_mesh(*of_mesh.groups())]
    of_iota = re.search(r"=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", group)
    if of_iota is not None:
        shape, dims, order = of_iota.groups()
        return [_iota(dims, order).reshape(_numbers(shape))[0].tolist()]
    return [_numbers(text) for text in re.findall(r"\{(\d[\d,]*)\}", group)]


def _of_mesh(shape: str, ids: str | None, axes: str) -> list[int]:
    """The first group of a mesh that XLA has named for itself: along these axes, or parts of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", shape)}
    order = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids or "")
    devices = np.arange(math.prod(sizes.values())) if order is None else _iota(*order.groups())
    devices = devices.reshape(tuple(sizes.values()))

    # `'x':(2)4` is the part of axis x that varies over 4 places, with 2 places of x before it.
    offsets: dict[str, list[Any]] = {name: [] for name in sizes}
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        step = sizes[name] // int(before) // int(part) if part else 1
        offsets[name].append(np.arange(int(part or sizes[name])) * step)
    chosen = list[Any]()
    for name in sizes:
        steps = offsets[name]
        chosen.append(functools.reduce(np.add.outer, steps).ravel() if steps else [0])
    return devices[np.ix_(*chosen)].ravel().tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order) if order else None).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
