"""What one device can do, and how fast it receives from others by the links of a group, by its maker's figures."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from torch_shard._cost.hlo import Array, Instruction, arrays_of


@dataclasses.dataclass(frozen=True)
class Chip:
    """The speed of one device.

    Attributes:
        flops: Products in bfloat16, per second.
        bandwidth: Of its memory, bytes per second.
        link: Bytes that it receives per second along one axis of a torus, from both sides together.
        clock: Cycles per second, where its compiler counts cycles; else None.
        unit: Rows and columns of its matrix unit, where that is known: narrower products leave a part of it idle.
        ring: Axes of its network are closed to rings if their size is a multiple of this; else they end.
        host_link: Bytes per second to the memory of its host or from it, one way, where that is known.
    """

    flops: float
    bandwidth: float
    link: float
    clock: float | None = None
    unit: int = 1
    ring: int = 1
    host_link: float | None = None


CHIPS = {
    "TPU v4": Chip(275e12, 1228e9, 100e9, 1.05e9, 128, 4, 16e9),
    "TPU v5 lite": Chip(197e12, 819e9, 100e9, 1.5e9, 128, 16, 16e9),
    "TPU v5": Chip(459e12, 2765e9, 200e9, 1.75e9, 128, 4, 16e9),
    "TPU v6 lite": Chip(918e12, 1640e9, 224e9, 1.75e9, 256, 16, 32e9),
    "TPU7x": Chip(1153e12, 3690e9, 200e9, 2.2e9, 256, 4),
    "NVIDIA": Chip(989e12, 3352e9, 450e9),  # an H100; of others the relations are much the same
}
"""By what the kind of a device contains; the longest that fits.

Source: Google Cloud's pages of each TPU; "How to Scale Your Model" (jax-ml.github.io/scaling-book) on rings and PCIe.
"""

UNKNOWN = Chip(1e12, 100e9, 10e9)
"""Of devices without known figures, CPUs for one: their relations alone matter."""


def chip_of(device: object) -> Chip:
    """The speed of a device of JAX, or of one of that kind."""
    kind = device if isinstance(device, str) else str(getattr(device, "device_kind", ""))
    names = [name for name in CHIPS if name in kind]
    # "TPU v5" is in "TPU v5 lite", too.
    return CHIPS[max(names, key=len)] if names else UNKNOWN


class Links:
    """The network of the devices of a mesh.

    Chips of a TPU slice lie on a torus. Along each of its axes over which a group extends, a chip of the group receives
    by two links if the group closes a ring, and by one if it ends; chips that lie further apart share the links between
    them with others.

    Args:
        devices: In the order of their numbers in a program.
    """

    def __init__(self, devices: Sequence[object]) -> None:
        self.chip: Chip = chip_of(devices[0])
        places: list[Any] = [getattr(device, "coords", None) for device in devices]
        self._places: list[tuple[int, ...]] = [] if None in places else [tuple(place) for place in places]
        self._sizes = [max(dim) - min(dim) + 1 for dim in zip(*self._places, strict=True)]

    def rate(self, groups: Sequence[Sequence[int]]) -> float:
        """Bytes per second that each device of a group receives, of which the first stands for all."""
        if not self._places or not groups or max(groups[0]) >= len(self._places):
            return self.chip.link
        coordinates = zip(*(self._places[member] for member in groups[0]), strict=True)
        total = 0.0
        for along, size in zip(coordinates, self._sizes, strict=True):
            total += self._rate_along(along, size)
        return total or self.chip.link

    def rate_of_pairs(self, pairs: Sequence[Sequence[int]]) -> float:
        """The same of what each device sends to one other, by the shortest way that there is among the pairs."""
        if not self._places or not pairs or max(map(max, pairs)) >= len(self._places):
            return self.chip.link / 2
        return self.chip.link / 2 / max(1, min(self._distance(*pair) for pair in pairs))

    def _rate_along(self, places: Sequence[int], size: int) -> float:
        """Along one axis of the torus."""
        distinct = sorted(set(places))
        if len(distinct) == 1:
            return 0.0
        apart = min(after - before for before, after in itertools.pairwise(distinct))
        is_ring = size % self.chip.ring == 0 and len(distinct) * apart == size
        # A link between two chips of the group passes `apart - 1` others, whose groups use it as well.
        return self.chip.link * (1.0 if is_ring else 0.5) / apart

    def _distance(self, source: int, target: int) -> int:
        total = 0
        for start, end, size in zip(self._places[source], self._places[target], self._sizes, strict=True):
            step = abs(start - end)
            if size % self.chip.ring == 0:  # there is a way around
                step = min(step, size - step)
            total += step
        return total


# What kernels written in Pallas take, of which XLA:TPU has no estimate: the larger of their products and their bytes.
#
# Attention is known by the names of JAX's kernels, and counted as causal. Its products are as wide as a head, so that
# a head of 128 leaves half of a matrix unit of 256 idle. Of other kernels what their authors say is taken.


KERNEL = "tpu_custom_call"

REACHED = 0.45
"""Of the peak, by products that are as wide as the matrix unit."""

PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Of queries and keys, or as large, in each kernel of attention; one that gives all gradients at once has five."""


def is_kernel(instruction: Instruction) -> bool:
    """Tell whether an instruction is one."""
    return instruction.op == "custom-call" and KERNEL in instruction.attributes


def kernel_cycles(kernel: Instruction, num_bytes: float, chip: Chip) -> float:
    """Of one run on a chip with a clock, of which so many bytes are read and written."""
    used = 1.0  # part of the matrix unit
    if _part(kernel) is not None:
        head_width = min(head.shape[-1] for head in _heads(kernel))
        used = min(1.0, head_width / chip.unit)
    compute = kernel_flops(kernel) / (REACHED * used * chip.flops)
    return (chip.clock or 0.0) * max(compute, num_bytes / chip.bandwidth)


def kernel_flops(kernel: Instruction) -> float:
    """Of one run: of attention those of keys that are seen, else as its author says; zero if that is not known."""
    part = _part(kernel)
    if part is None:
        return float(kernel.find(r'"?cost_estimate"?:\{[^}]*"?flops"?:"?(\d+)') or 0)
    queries, keys = _heads(kernel)
    # A kernel `dkv` with three results as large as queries gives their gradient, too.
    num_gradients = sum(len(array.shape) >= len(queries.shape) for array in kernel.results)
    num_products = PRODUCTS[part] + (part == "dkv" and num_gradients > 2)
    # A product multiplies and adds, and a causal mask leaves half of it.
    return num_products * math.prod(queries.shape) * keys.shape[-2]


def _part(kernel: Instruction) -> str | None:
    """Which kernel of attention this is; None for others."""
    match = re.search(r"(?:splash|flash)_(?:mha|mqa)_(?:\w*?_)?(fwd|dq|dkv)|flash_(attention)", kernel.name)
    if match is None or len(_heads(kernel)) < 2:
        return None
    return match.group(1) or "fwd"


def _heads(kernel: Instruction) -> list[Array]:
    """Queries and keys."""
    operands = arrays_of(kernel.find(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "")
    # Before them stand numbers and masks, in other dtypes or with fewer dims.
    return [array for array in operands if len(array.shape) > 2 and array.dtype in ("bf16", "f32")][:2]
