"""What a compiled program costs one device: each instruction by itself, loops as often as they run.

Cycles are XLA:TPU's own `estimated_cycles`, without communication. Kernels written in Pallas have none: see `kernels`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from torch_shard._common.printed import starred
from torch_shard._cost.chips import Chip, is_kernel, kernel_cycles, kernel_flops
from torch_shard._cost.hlo import KINDS, Array, Collective, Hlo, Instruction, between_slices, identity, travelling

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
        self.hlo = hlo
        self._chip = chip
        self._traffic = Traffic(hlo)
        self._seen: set[tuple[str | None, ...]] = set()
        self._is_estimated = any(_cycles(instruction) is not None for instruction in hlo.made.values())

    def computation(self, name: str, times: float) -> Iterator[Cost]:
        """Costs of the instructions of a computation that runs so often."""
        for instruction in self.hlo.computations[name]:
            if instruction.op in _FREE or instruction.op.endswith(("-done", "-update")):
                continue
            inner = self.hlo.inner(instruction)
            for called, number in inner:
                yield from self.computation(called, times * number)
            if inner:
                continue

            yield from self._collectives(instruction, times)
            if instruction.kind in KINDS:
                continue
            num_bytes = between_slices(instruction)
            if num_bytes or instruction.op in ("send", "recv"):
                yield Cost(self.hlo.label(instruction), times, between_slices=num_bytes * times)
            # Other custom calls (annotations of shardings, allocations) are no work.
            elif instruction.op != "custom-call" or is_kernel(instruction):
                yield self._of_instruction(instruction, times)

    def _of_instruction(self, instruction: Instruction, times: float) -> Cost:
        cycles = self.cycles(instruction)
        on_device = [array for array in instruction.results if not array.is_on_host]
        largest = max(on_device, key=lambda array: array.num_bytes, default=None)
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
        if chip is None or chip.clock is None:
            return int(self._total(instruction, _cycles)) or None
        if is_kernel(instruction):
            return int(kernel_cycles(instruction, self._traffic.of(instruction), chip))

        # XLA:TPU writes its estimates as it generates code.
        is_beside = instruction.op in STARTS or instruction.kind in KINDS
        if not self._is_estimated and not is_beside:
            compute = self._flops(instruction) / chip.flops
            traffic = self._traffic.of(instruction) / chip.bandwidth
            return int(chip.clock * max(compute, traffic)) or None
        return int(self._total(instruction, _cycles)) or None

    def _flops(self, instruction: Instruction) -> float:
        return self._total(instruction, lambda inner: flops_of(self.hlo, inner))

    def _total(self, instruction: Instruction, measure: Callable[[Instruction], float | None]) -> float:
        """Of an instruction that has none of its own, what all have that are fused into it."""
        value = measure(instruction)
        if value is not None:
            return value
        total = 0.0
        called = self.hlo.called(instruction) if instruction.op in ("fusion", "call") else []
        for name in called:
            for inner in self.hlo.computations[name]:
                total += self._total(inner, measure)
        return total

    def _collectives(self, instruction: Instruction, times: float) -> Iterator[Cost]:
        for inner, collective in travelling(self.hlo, instruction):
            key = identity(inner)
            # The parts of a chain are one collective.
            if key in self._seen:
                continue
            self._seen.add(key)
            label = self.hlo.label(instruction)
            if inner is not instruction and inner.label:
                label = inner.label
            yield Cost(label, times, collective=collective)


def _host_bytes(instruction: Instruction) -> float:
    """What a copy, or that of a slice, brings from the host's memory or puts there: its array in the device's."""
    results = instruction.results
    if not instruction.op.endswith("-start") or not any(array.is_on_host for array in results):
        return 0.0
    # The result of a start is a tuple of both arrays and of what marks the end, which has no shape.
    sizes = [array.num_padded_bytes for array in results if array.shape and not array.is_on_host]
    return max(sizes, default=0.0)


def _cycles(instruction: Instruction) -> int | None:
    estimate = instruction.find(r'"estimated_cycles":"(\d+)"')
    if estimate is None or int(estimate) >= _OVERFLOW:
        return None
    return int(estimate)


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
    num_summed = math.prod(left[int(dim)] for dim in dims.split(",") if dim)
    return 2.0 * math.prod(dot.results[0].shape) * num_summed


def _convolution(hlo: Hlo, instruction: Instruction) -> float:
    """Taps that meet padding or the holes of a dilated input do not count."""
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.attributes)
    if labels is None:
        return 0.0
    # One letter for each dim: b and f are rows and channels, i and o the channels of a kernel, digits its places.
    left_dims, right_dims, out_dims = labels.groups()
    left = hlo.operand(instruction.operands[0])[0].shape
    right = hlo.operand(instruction.operands[1])[0].shape
    out = instruction.results[0].shape

    window = dict[str, str]()
    for setting in (instruction.find(r"window=\{([^}]*)\}") or "").split():
        name, _, value = setting.partition("=")
        window[name] = value

    num_rows, num_channels = (out[out_dims.index(letter)] for letter in "bf")
    total = 2.0 * num_rows * num_channels * right[right_dims.index("i")]
    places = [dim for dim in out_dims if dim.isdigit()]
    for number, dim in enumerate(places):
        total *= _taps(window, number, left[left_dims.index(dim)], out[out_dims.index(dim)])
    return total


def _taps(window: dict[str, str], number: int, num_in: int, num_out: int) -> int:
    """How many pairs of an output and an input meet along one dim of the window."""

    def setting(name: str, default: int) -> int:
        return int(window[name].split("x")[number]) if name in window else default

    padding = 0
    if "pad" in window:
        before, _, _ = window["pad"].split("x")[number].partition("_")
        padding = int(before)
    taps = np.arange(setting("size", 1)) * setting("rhs_dilate", 1) - padding
    starts = np.arange(num_out) * setting("stride", 1)
    places = np.add.outer(starts, taps)

    # A dilated input has a value at each so many places, and holes between them.
    spread = setting("lhs_dilate", 1)
    is_inside = (places >= 0) & (places <= (num_in - 1) * spread)
    return int(np.sum(is_inside & (places % spread == 0)))


# Costs of a program by the module that they are for.


OPTIMIZER, LOSS, COMPILER = "(optimizer)", "(loss)", "(not attributed)"


@dataclasses.dataclass
class ModuleCost:
    """What a module costs one device, forward and backward.

    Attributes:
        path: Of the module, `model.layers.*` for the layers of a loop; or `(optimizer)`, `(loss)`, for what is of no
            module, or `(not attributed)`.
        collectives: For each kind, how many there are, each time counted.
        received: Bytes by each kind of them.
        flops: Of products.
        memory_bytes: Read from the device's memory and written to it.
        cycles: By XLA:TPU's estimate, without communication; zero on other devices.
        constrained: Why the step lays out values of it on the mesh, as `step.constraints` says it.
    """

    path: str
    collectives: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    received: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    flops: float = 0.0
    memory_bytes: float = 0.0
    cycles: int = 0
    constrained: tuple[str, ...] = ()

    @property
    def received_bytes(self) -> float:
        """From other devices, by all kinds of collectives."""
        return sum(self.received.values())

    def add(self, cost: Cost) -> None:
        """Count what one instruction costs."""
        if cost.collective is not None:
            kind = cost.collective.kind
            self.collectives[kind] = self.collectives.get(kind, 0) + int(cost.times)
            self.received[kind] = self.received.get(kind, 0.0) + cost.received_bytes
        self.flops += cost.flops
        self.memory_bytes += cost.memory_bytes
        self.cycles += cost.cycles or 0


class ModulePaths:
    """Finds the modules of a model in the labels of a program."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._known = {starred(path) for path in paths if path}

    def find(self, label: str) -> str:
        """The path of the module in a label, or what else it is for."""
        path = ""
        parts = label.split(":")[0].split("/")  # XLA lists the labels of what it combines
        for part in map(_unmapped, parts):
            longer = f"{path}.{part}" if path else part
            if starred(longer) in self._known:
                path = longer
        if path:
            return path
        if OPTIMIZER.strip("()") in parts:
            return OPTIMIZER
        return LOSS if "jit(" in label else COMPILER

    def by_module(self, costs: Iterable[Cost], why: Callable[[str], tuple[str, ...]]) -> list[ModuleCost]:
        """The costs of each module, in the order of their first instructions, and why it is constrained."""
        modules: dict[str, ModuleCost] = {}
        for cost in costs:
            path = self.find(cost.label)
            if path not in modules:
                modules[path] = ModuleCost(path, constrained=why("" if path == LOSS else path))
            modules[path].add(cost)
        return list(modules.values())


def _unmapped(part: str) -> str:
    """A part of a label without what `jax.vmap` puts around it: the layers of a pipeline are mapped over its stages."""
    return part.removeprefix("vmap(").removesuffix(")") if part.startswith("vmap(") else part


# Bytes that instructions of a compiled program read from the device's memory and write to it.
#
# What only a slice is read of counts as the slice; what is updated in place, as the update; what lies on the chip,
# not.


_SLICES = ("dynamic-slice", "slice", "gather")
_ALIASES = ("bitcast", "copy", "reshape")
STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "async-start")
"""What moves beside the arithmetic."""


class Traffic:
    """Bytes read and written by the instructions of a program."""

    def __init__(self, hlo: Hlo) -> None:
        self._hlo = hlo
        self._users: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
        for instruction in hlo.made.values():
            # In the place of operands, a parameter has its number.
            if instruction.op == "parameter":
                continue
            for number, name in enumerate(instruction.operands):
                self._users[name].append((instruction, number))

    def of(self, instruction: Instruction) -> float:
        """Bytes that one run of an instruction moves."""
        if instruction.op in STARTS:
            return self._of_start(instruction)

        total = 0.0
        for number, name in enumerate(instruction.operands):
            size = _in_memory(*self._hlo.operand(name))
            if size:
                total += min(size, self._read(instruction, number))

        results = instruction.results
        written = self._written(instruction)
        if len(written) != len(results):
            return total + _in_memory(*results)
        for array, part in zip(results, written, strict=True):
            total += min(_in_memory(array), part)
        return total

    def _of_start(self, instruction: Instruction) -> float:
        if instruction.op == "copy-start":
            return _in_memory(*instruction.results[:2])
        sizes = [array.num_padded_bytes for array in instruction.results]
        if instruction.op == "slice-start":
            return sizes[min(1, len(sizes) - 1)] if sizes else 0
        return 2 * min(sizes, default=0)

    def _read(self, user: Instruction, operand: int) -> float:
        """Bytes of an operand that an instruction reads; infinite where that may be all."""
        if user.op in _SLICES:
            return _size_of(*user.results) if operand == 0 else 0
        # It is written to in place: what is around the update is neither read nor written.
        if user.op == "dynamic-update-slice" and operand != 1:
            return 0
        called = self._hlo.called(user) if user.op == "fusion" else []
        if not called:
            return math.inf

        body = self._hlo.computations[called[0]]
        waiting = [i.name for i in body if i.op == "parameter" and i.operands == [str(operand)]]
        total = 0.0
        while waiting:
            for inner, number in self._users[waiting.pop()]:
                if inner.op in _ALIASES:
                    waiting.append(inner.name)
                else:
                    total += self._read(inner, number)
        return total

    def _written(self, instruction: Instruction) -> list[float]:
        """Bytes of each result that an instruction writes; infinite where that may be all."""
        if instruction.op == "dynamic-update-slice":
            return [_size_of(*self._hlo.operand(instruction.operands[1]))]
        called = self._hlo.called(instruction) if instruction.op == "fusion" else []
        if not called:
            return [math.inf]
        root = next(inner for inner in self._hlo.computations[called[0]] if inner.is_root)
        names = root.operands if root.op == "tuple" else [root.name]
        return [self._of_result(name) for name in names]

    def _of_result(self, name: str) -> float:
        made = self._hlo.made[name]
        while made.op in _ALIASES:
            made = self._hlo.made[made.operands[0]]
        written = self._written(made)
        return written[0] if len(written) == 1 else math.inf


def _size_of(*arrays: Array) -> float:
    return sum(array.num_padded_bytes for array in arrays)


def _in_memory(*arrays: Array) -> float:
    """Bytes that are not on the chip."""
    return _size_of(*(array for array in arrays if not array.is_on_chip))
