"""What the devices of a program tell each other: bytes that one of them receives."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torch_shard._cost.hlo import Hlo, Instruction

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
