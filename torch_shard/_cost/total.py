"""What a compiled program costs one device: each instruction by itself, loops as often as they run.

Cycles are XLA:TPU's own `estimated_cycles`, without communication; a kernel written in Pallas has none.
"""

import dataclasses
from collections.abc import Iterator

from torch_shard._cost.collectives import KINDS, Collective, between_slices, identity, travelling
from torch_shard._cost.flops import flops_of
from torch_shard._cost.hlo import Hlo, Instruction
from torch_shard._cost.memory_traffic import Traffic

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"opt-barrier", "iota_none", "add-dependency", "async-update"}
)

_OVERFLOW = 10**12  # the compiler's own mark

_KERNEL = "tpu_custom_call"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one instruction costs.

    Attributes:
        label: The names of JAX's scopes around it.
        op: The operation.
        times: How often it runs.
        cycles: Of all its runs together, by the compiler; None where it does not say. So are the following.
        flops: Of products.
        memory_bytes: Read from the device's memory and written to it.
        collective: What it receives from other devices, each time.
        largest: Bytes of its largest result, and what that is.
        between_slices: Bytes from other TPU slices, all times together.
    """

    label: str
    op: str
    times: float
    cycles: int | None = None
    flops: float = 0.0
    memory_bytes: float = 0.0
    collective: Collective | None = None
    largest: tuple[float, str] = (0.0, "")
    between_slices: float = 0.0

    @property
    def received_bytes(self) -> float:
        """From other devices, all times together."""
        return 0.0 if self.collective is None else self.collective.num_bytes * self.times


def costs_of(text: str) -> list[Cost]:
    """What each instruction of a program costs one device.

    Args:
        text: As `jax.stages.Compiled.as_text()` gives it.
    """
    walk = Walk(Hlo(text))
    return list(walk.computation(walk.hlo.entry, 1))


class Walk:
    """A program, instruction by instruction."""

    def __init__(self, hlo: Hlo) -> None:
        self.hlo, self._traffic = hlo, Traffic(hlo)
        self._seen: set[tuple[str | None, ...]] = set()
        self._sums: dict[tuple[str, str], float] = {}

    def computation(self, name: str, times: float) -> Iterator[Cost]:
        """Costs of the instructions of a computation that runs so often."""
        for instruction in self.hlo.computations[name]:
            if instruction.op in _FREE or instruction.op.endswith(("-done", "-update")):
                continue
            if inner := self.hlo.inner(instruction):
                for called, number in inner:
                    yield from self.computation(called, times * number)
                continue
            yield from self._collectives(instruction, times)
            if instruction.kind in KINDS:
                continue
            if (num_bytes := between_slices(instruction)) or instruction.op in ("send", "recv"):
                yield Cost(self.hlo.label(instruction), instruction.op, times, between_slices=num_bytes * times)
            elif instruction.op != "custom-call" or _KERNEL in instruction.attributes:
                yield self._own(instruction, times)

    def _own(self, instruction: Instruction, times: float) -> Cost:
        called = self.hlo.called(instruction) if instruction.op == "fusion" else []
        cycles = self.cycles(instruction)
        largest = max(instruction.results, key=lambda array: array.num_bytes, default=None)
        return Cost(
            self.hlo.label(instruction),
            instruction.op,
            times,
            cycles=None if cycles is None else int(cycles * times),
            flops=(flops_of(self.hlo, instruction) + sum(self._sum(name, "flops") for name in called)) * times,
            memory_bytes=self._traffic.of(instruction) * times,
            largest=(0.0, "") if largest is None else (largest.num_bytes, f"{largest.dtype}{list(largest.shape)}"),
        )

    def cycles(self, instruction: Instruction) -> int | None:
        """Of one run, by the compiler."""
        cycles = _cycles(instruction)
        if cycles is None and instruction.op == "fusion":
            cycles = int(sum(self._sum(name, "cycles") for name in self.hlo.called(instruction))) or None
        return cycles

    def _sum(self, computation: str, what: str) -> float:
        """Flops or cycles of all that is fused into a computation."""
        if (computation, what) not in self._sums:
            total = 0.0
            for instruction in self.hlo.computations[computation]:
                inner = self.hlo.called(instruction) if instruction.op in ("fusion", "call") else []
                own = _cycles(instruction) if what == "cycles" else flops_of(self.hlo, instruction)
                if what == "flops" or own is None:
                    own = (own or 0) + sum(self._sum(name, what) for name in inner)
                total += own
            self._sums[computation, what] = total
        return self._sums[computation, what]

    def _collectives(self, instruction: Instruction, times: float) -> Iterator[Cost]:
        for inner, moved in travelling(self.hlo, instruction):
            if (key := identity(inner)) not in self._seen:
                self._seen.add(key)
                label = self.hlo.label(instruction)
                own = "" if inner is instruction else inner.label
                yield Cost(own or label, inner.op, times, collective=moved)


def _cycles(instruction: Instruction) -> int | None:
    found = instruction.find(r'"estimated_cycles":"(\d+)"')
    return int(found) if found is not None and int(found) < _OVERFLOW else None
