"""What the devices of a program tell each other: bytes that one of them receives."""

import dataclasses
import math
import re

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
    """What a collective moves, by the best known way: a ring.

    Args:
        hlo: The program.
        instruction: The collective.
        scatters: Whether each device keeps its part of an all-reduce alone: XLA's form of a reduce-scatter on TPU.
    """
    size = _group_size(instruction)
    share = (size - 1) / size if size else 1.0
    given = sum(array.num_bytes for array in hlo.inputs(instruction))
    results = sum(array.num_bytes for array in instruction.results)
    kind = instruction.kind
    if kind == "all-gather":
        results = max(results - given, 0) if instruction.op != kind else results  # a start gives its inputs, too
        return Collective(kind, results * share)
    if kind == "all-reduce":
        return Collective("reduce-scatter" if scatters else kind, (1 if scatters else 2) * given * share)
    return Collective(kind, given if kind == "collective-permute" else given * share)


def identity(instruction: Instruction) -> tuple[str | None, ...]:
    """The same for the parts of one collective that was cut into a chain.

    A channel alone does not tell: all collectives of a `jax.shard_map` share one.
    """
    if chain := instruction.find(r'chain_id="(\d+)"'):
        return instruction.op, "chain", chain, instruction.find(r"channel_id=(\d+)")
    return instruction.op, instruction.name


def _group_size(instruction: Instruction) -> int:
    """How many devices take part; 0 if that is not said."""
    text = instruction.attributes
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(found.group(2))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))?\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found.group(2))  # of a part of an axis, its own size
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return len(found.group(1).split(",")) if found else 0
