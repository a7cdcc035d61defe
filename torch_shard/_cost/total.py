"""What a compiled program costs one device: each instruction by itself, loops as often as they run.

Cycles are XLA:TPU's own `estimated_cycles`, without communication. Kernels written in Pallas have none: see `kernels`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from torch_shard._cost.chips import Chip
from torch_shard._cost.collectives import KINDS, Collective, between_slices, identity, travelling
from torch_shard._cost.hlo import Hlo, Instruction
from torch_shard._cost.kernels import is_kernel, kernel_cycles, kernel_flops
from torch_shard._cost.memory_traffic import STARTS, Traffic

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"opt-barrier", "iota_none", "add-dependency", "async-update"}
)

_OVERFLOW = 10**12  # the compiler's own mark


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one instruction costs.

    Attributes:
        label: The names of JAX's scopes around it.
        times: How often it runs.
        cycles: Of all its runs together, by the compiler; None where it does not say. So are the following.
        flops: Of products.
        memory_bytes: Read from the device's memory and written to it.
        collective: What it receives from other devices, each time.
        largest: Bytes of its largest result, and what that is.
        between_slices: Bytes from other TPU slices, all times together.
        host_bytes: That come from the host's memory or go there, all times together.
        kernel: The name of a kernel written in Pallas; empty for all others.
    """

    label: str
    times: float
    cycles: int | None = None
    flops: float = 0.0
    memory_bytes: float = 0.0
    collective: Collective | None = None
    largest: tuple[float, str] = (0.0, "")
    between_slices: float = 0.0
    host_bytes: float = 0.0
    kernel: str = ""

    @property
    def received_bytes(self) -> float:
        """From other devices, all times together."""
        return 0.0 if self.collective is None else self.collective.num_bytes * self.times


def costs_of(text: str, chip: Chip | None = None) -> list[Cost]:
    """What each instruction of a program costs one device.

    Args:
        text: As `jax.stages.Compiled.as_text()` gives it.
        chip: Of the device, where cycles of kernels written in Pallas are to be estimated.
    """
    walk = Walk(Hlo(text), chip)
    return list(walk.computation(walk.hlo.entry, 1))


class Walk:
    """A program, instruction by instruction."""

    def __init__(self, hlo: Hlo, chip: Chip | None = None) -> None:
        self.hlo, self._traffic, self._chip = hlo, Traffic(hlo), chip
        self._seen: set[tuple[str | None, ...]] = set()
        self._is_estimated = any(_cycles(instruction) is not None for instruction in hlo.made.values())

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
                yield Cost(self.hlo.label(instruction), times, between_slices=num_bytes * times)
            elif instruction.op != "custom-call" or is_kernel(instruction):
                yield self._own(instruction, times)

    def _own(self, instruction: Instruction, times: float) -> Cost:
        cycles = self.cycles(instruction)
        results = [array for array in instruction.results if not array.is_on_host]
        largest = max(results, key=lambda array: array.num_bytes, default=None)
        return Cost(
            self.hlo.label(instruction),
            times,
            cycles=None if cycles is None else int(cycles * times),
            flops=self._flops(instruction) * times,
            memory_bytes=self._traffic.of(instruction) * times,
            largest=(0.0, "") if largest is None else (largest.num_bytes, f"{largest.dtype}{list(largest.shape)}"),
            host_bytes=_host_bytes(instruction) * times,
            kernel=instruction.name if is_kernel(instruction) else "",
        )

    def cycles(self, instruction: Instruction) -> int | None:
        """Of one run, by the compiler.

        If the chip is known, of a kernel by what it does; and so of all, where code was not generated yet.
        """
        chip = self._chip
        if chip is not None and chip.clock is not None:
            if is_kernel(instruction):
                return int(kernel_cycles(instruction, self._traffic.of(instruction), chip))
            if not (self._is_estimated or instruction.op in STARTS or instruction.kind in KINDS):
                seconds = max(self._flops(instruction) / chip.flops, self._traffic.of(instruction) / chip.bandwidth)
                return int(chip.clock * seconds) or None
        return int(self._total(instruction, _cycles)) or None

    def _flops(self, instruction: Instruction) -> float:
        return self._total(instruction, lambda inner: flops_of(self.hlo, inner))

    def _total(self, instruction: Instruction, own: Callable[[Instruction], float | None]) -> float:
        """Of an instruction that has none of its own, what all have that are fused into it."""
        if (found := own(instruction)) is not None:
            return found
        called = self.hlo.called(instruction) if instruction.op in ("fusion", "call") else []
        return sum(self._total(inner, own) for name in called for inner in self.hlo.computations[name])

    def _collectives(self, instruction: Instruction, times: float) -> Iterator[Cost]:
        for inner, moved in travelling(self.hlo, instruction):
            if (key := identity(inner)) not in self._seen:
                self._seen.add(key)
                label = self.hlo.label(instruction)
                own = "" if inner is instruction else inner.label
                yield Cost(own or label, times, collective=moved)


def _host_bytes(instruction: Instruction) -> float:
    """What a copy, or that of a slice, brings from the host's memory or puts there: its array in the device's."""
    results = instruction.results
    if not instruction.op.endswith("-start") or not any(array.is_on_host for array in results):
        return 0.0
    return max((array.num_padded_bytes for array in results if array.shape and not array.is_on_host), default=0.0)


def _cycles(instruction: Instruction) -> int | None:
    found = instruction.find(r'"estimated_cycles":"(\d+)"')
    return int(found) if found is not None and int(found) < _OVERFLOW else None


def flops_of(hlo: Hlo, instruction: Instruction) -> float | None:
    """Multiplications and additions of a product; None for what is none."""
    if instruction.op == "dot":
        return _dot(hlo, instruction)
    if is_kernel(instruction):
        return kernel_flops(instruction)
    return _convolution(hlo, instruction) if instruction.op == "convolution" else None


def _dot(hlo: Hlo, dot: Instruction) -> float:
    left = hlo.operand(dot.operands[0])[0].shape
    dims = dot.find(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return 2.0 * math.prod(dot.results[0].shape) * math.prod(left[int(dim)] for dim in dims.split(",") if dim)


def _convolution(hlo: Hlo, instruction: Instruction) -> float:
    """Taps that meet padding or the holes of a dilated input do not count."""
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.attributes)
    if labels is None:
        return 0.0
    left_dims, right_dims, out_dims = labels.groups()
    left, right = (hlo.operand(name)[0].shape for name in instruction.operands[:2])
    out = instruction.results[0].shape
    given = dict(pair.split("=", 1) for pair in (instruction.find(r"window=\{([^}]*)\}") or "").split())
    total = 2.0 * math.prod(out[out_dims.index(dim)] for dim in "bf") * right[right_dims.index("i")]
    for at, dim in enumerate(dim for dim in out_dims if dim.isdigit()):
        total *= _taps(given, at, left[left_dims.index(dim)], out[out_dims.index(dim)])
    return total


def _taps(window: dict[str, str], at: int, num_in: int, num_out: int) -> int:
    """How many pairs of an output and an input meet along one dim of the window."""

    def setting(name: str, default: int) -> int:
        return int(window[name].split("x")[at]) if name in window else default

    low = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
    taps, spread = np.arange(setting("size", 1)) * setting("rhs_dilate", 1) - low, setting("lhs_dilate", 1)
    places = np.add.outer(np.arange(num_out) * setting("stride", 1), taps)
    return int(np.sum((places >= 0) & (places <= (num_in - 1) * spread) & (places % spread == 0)))
