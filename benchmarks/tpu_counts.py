"""What a program compiled for TPUs takes of one device, counted: by the same reading of its text for every side.

Cycles are the compiler's own estimates, without communication. A kernel written in Pallas has none: see
`torch_shard/_cost/chips.py`.
"""

import dataclasses

import jax
from jax.sharding import Mesh

from torch_shard._cost import chip_of, costs_of
from torch_shard._cost.exposed import exposed_by_axis

FLOPS_PER_CYCLE = 131_072
"""Of v5e: 197 Tflop per second at 1.5 GHz."""
BYTES_PER_CYCLE = 546
"""Of its memory: 819 GB per second."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """One step on one device.

    Attributes:
        cycles: With those of kernels.
        kernel_cycles: Of these, what is estimated for kernels.
        exposed: Cycles of communication that the schedule does not hide.
        wire: Bytes received from other devices.
        temporaries: Bytes held, beside arguments and results.
        traffic: Bytes read from the device's memory and written to it.
        flops: Of products and kernels.
        host: Bytes that come from the host's memory or go there.
        compile_s: Seconds of a core until it was compiled, tracing included.
        host_memory: Bytes that the process held at most until then.
    """

    cycles: float
    kernel_cycles: float
    exposed: float
    wire: float
    temporaries: float
    traffic: float
    flops: float = 0.0
    host: float = 0.0
    compile_s: float = 0.0
    host_memory: float = 0.0

    @property
    def time(self) -> float:
        """Cycles, with those of waiting."""
        return self.cycles + self.exposed


def counts_of(compiled: jax.stages.Compiled, mesh: Mesh, used: float = 1.0) -> Counts:
    """Read a compiled program; of the arithmetic of JAX's grouped products, only what is used counts."""
    found = counts_of_text(compiled.as_text() or "", mesh, used)
    return dataclasses.replace(found, temporaries=compiled.memory_analysis().temp_size_in_bytes)


def counts_of_text(text: str, mesh: Mesh, used: float = 1.0) -> Counts:
    """The same of its text, which says nothing of temporaries."""
    costs = costs_of(text, chip_of(mesh.devices.flat[0]))
    kernels = [cost for cost in costs if cost.kernel]
    idle = [cost for cost in kernels if "gmm" in cost.kernel]
    unused = (1 - used) * sum(cost.cycles or 0 for cost in idle)
    return Counts(
        cycles=sum(cost.cycles or 0 for cost in costs) - unused,
        kernel_cycles=sum(cost.cycles or 0 for cost in kernels) - unused,
        exposed=sum((exposed_by_axis(text, mesh) or {}).values()),
        wire=sum(cost.received_bytes for cost in costs),
        temporaries=0.0,
        traffic=sum(cost.memory_bytes for cost in costs),
        flops=sum(cost.flops for cost in costs) - (1 - used) * sum(cost.flops for cost in idle),
        host=sum(cost.host_bytes for cost in costs),
    )


def received_by(text: str) -> float:
    """Bytes that one device receives from others in a step."""
    return sum(cost.received_bytes for cost in costs_of(text))
