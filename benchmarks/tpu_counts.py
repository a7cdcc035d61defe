"""What a program compiled for TPUs takes of one device, counted: by the same reading of its text for every side.

Cycles are the compiler's own estimates, without communication. A kernel written in Pallas has none: its products are
taken to run at 45 % of the chip's peak.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax

from torch_shard._cost.exposed import exposed_by_axis
from torch_shard._cost.hlo import Hlo, Instruction, arrays_of
from torch_shard._cost.total import costs_of

FLOPS_PER_CYCLE = 131_072
"""Of v5e: 197 Tflop per second at 1.5 GHz."""
FASTER = {"TPU v5": 2}
"""So many times that, by kind: v5p has 459 Tflop per second at 1.75 GHz."""
BYTES_PER_CYCLE = 546
"""Of its memory: 819 GB per second."""
REACHED = 0.45
"""Of the peak, by kernels."""
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Of queries and keys, or as large, in each kernel of splash attention."""


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
    compile_s: float = 0.0
    host_memory: float = 0.0

    @property
    def time(self) -> float:
        """Cycles, with those of waiting."""
        return self.cycles + self.exposed


def counts_of(compiled: jax.stages.Compiled, device_kind: str = "TPU v5 lite", used: float = 1.0) -> Counts:
    """Read a compiled program; of the arithmetic of JAX's grouped products, only what is used counts."""
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    costs, flops = costs_of(text), kernel_flops(Hlo(text), used)
    kernels = flops / (FLOPS_PER_CYCLE * FASTER.get(device_kind, 1) * REACHED)
    return Counts(
        cycles=sum(cost.cycles or 0 for cost in costs) + kernels,
        kernel_cycles=kernels,
        exposed=sum((exposed_by_axis(text, device_kind, {}) or {}).values()),
        wire=sum(cost.received_bytes for cost in costs),
        temporaries=memory.temp_size_in_bytes,
        traffic=sum(cost.memory_bytes for cost in costs),
        flops=sum(cost.flops for cost in costs) + flops,
    )


def kernel_flops(hlo: Hlo, used: float = 1.0) -> float:
    """Of all kernels: as their authors say, else as causal attention."""
    return sum(_flops(kernel, used) * times for kernel, times in _kernels(hlo, hlo.entry, 1))


def _kernels(hlo: Hlo, computation: str, times: float) -> Iterator[tuple[Instruction, float]]:
    for instruction in hlo.computations[computation]:
        if "tpu_custom_call" in instruction.attributes:
            yield instruction, times
        for called, number in hlo.inner(instruction):
            yield from _kernels(hlo, called, times * number)


def _flops(kernel: Instruction, used: float) -> float:
    if (said := kernel.find(r'"?cost_estimate"?:\{[^}]*"?flops"?:"?(\d+)')) is not None:
        return float(said) * (used if "gmm" in kernel.name else 1.0)
    given = [a for a in arrays_of(kernel.find(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "") if len(a.shape) > 2]
    queries, keys = [a.shape for a in given if a.dtype in ("bf16", "f32")][:2]
    part = re.search("|".join(PRODUCTS), kernel.name)
    if part is None:
        raise ValueError(f"the kernel {kernel.name} does not say how much it computes")
    return PRODUCTS[part.group()] * math.prod(queries) * keys[-2]  # twice for multiply and add, half for causal
