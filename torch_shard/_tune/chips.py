"""How fast the chips of a mesh are, by their makers' figures; and how long what a program costs takes there."""

import dataclasses

from torch_shard._cost import Preview

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """The speed of one device.

    Attributes:
        flops: Products in bfloat16, per second.
        bandwidth: Of its memory, bytes per second.
        link: Bytes that it receives per second along one axis of the mesh.
        clock: Cycles per second, where its compiler counts cycles; else None.
    """

    flops: float
    bandwidth: float
    link: float
    clock: float | None = None

    @property
    def has_cycles(self) -> bool:
        """Tell whether its compiler says how long a program takes."""
        return self.clock is not None


CHIPS = {
    "TPU v4": Chip(275e12, 1228e9, 100e9, 1.05e9),
    "TPU v5 lite": Chip(197e12, 819e9, 100e9, 1.5e9),  # 67 bytes per cycle and axis
    "TPU v5": Chip(459e12, 2765e9, 200e9, 1.75e9),
    "TPU v6 lite": Chip(918e12, 1640e9, 224e9, 1.75e9),
    "TPU7x": Chip(1153e12, 3690e9, 200e9, 2.2e9),
    "A100": Chip(312e12, 2039e9, 300e9),
    "H100": Chip(989e12, 3352e9, 450e9),
    "H200": Chip(989e12, 4800e9, 450e9),
    "B200": Chip(2250e12, 7672e9, 900e9),
}
"""By what the kind of a device contains; the longest that fits."""

UNKNOWN = Chip(1e12, 100e9, 10e9)
"""Of devices without known figures, CPUs for one: their relations alone matter."""

KERNELS = 0.45
"""Part of the peak at which kernels in Pallas multiply, of which the compiler says no cycles."""


def chip_of(device: object) -> Chip:
    """The speed of a device.

    Args:
        device: One of JAX.
    """
    kind = str(getattr(device, "device_kind", ""))
    found = [name for name in CHIPS if name in kind]
    return CHIPS[max(found, key=len)] if found else UNKNOWN


def exposed_seconds(preview: Preview, chip: Chip, axes: int) -> float:
    """Time of a step in which a device does nothing but wait for others.

    Args:
        preview: Of the step. Where it does not say what its schedule leaves exposed, everything that is received is.
        chip: Its devices.
        axes: Number of the mesh's axes that split something, each with links of its own.
    """
    if chip.clock is not None and preview.exposed is not None:
        return preview.exposed / chip.clock
    return preview.collective_bytes / (chip.link * max(axes, 1))


def compute_seconds(preview: Preview, chip: Chip, kernel_flops: float) -> float:
    """Time of a step that is no communication.

    Args:
        preview: Of the step.
        chip: Its devices.
        kernel_flops: Of one device, in kernels, if the program has some.
    """
    if chip.clock is None or not preview.cycles:
        return max(preview.flops / chip.flops, preview.memory_bytes / chip.bandwidth)
    text = preview.compiled.as_text() or "" if preview.compiled is not None else ""
    kernels = kernel_flops / (KERNELS * chip.flops) if "tpu_custom_call" in text else 0.0
    return preview.cycles / chip.clock + kernels
