"""What one device can do, by its maker's figures."""

import dataclasses


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
    found = [name for name in CHIPS if name in kind]
    return CHIPS[max(found, key=len)] if found else UNKNOWN
