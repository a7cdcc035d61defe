"""What a compiled program communicates, read from its HLO.

`benchmarks/counts.py` has its own, with bytes on the wire: benchmarks import no tests.
"""

import collections
import dataclasses
import math
import re
from typing import Any

_KINDS = r"all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\((.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\S+),")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of a program: its kind, its results as `(dtype, shape)`, and between which devices it is."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    groups: str

    @property
    def sizes(self) -> list[int]:
        """Elements of each result."""
        return [math.prod(shape) for _, shape in self.arrays]


def collectives_of(compiled: Any) -> list[Collective]:
    """All of a program, `jax.jit(...).lower(...).compile()`; those within a loop once."""
    found = []
    for arrays, kind, rest in _COLLECTIVE.findall(compiled.as_text()):
        shapes = [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(arrays)]
        groups = _GROUPS.search(rest)
        found.append(Collective(kind, tuple(shapes), groups[1] if groups else ""))
    return found


def count_collectives(compiled: Any) -> collections.Counter[str]:
    """How many of each kind."""
    return collections.Counter(found.kind for found in collectives_of(compiled))
