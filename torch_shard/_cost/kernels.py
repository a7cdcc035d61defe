"""What kernels written in Pallas take, of which XLA:TPU has no estimate: the larger of their products and their bytes.

Attention is known by the names of JAX's kernels, and counted as causal. Its products are as wide as a head, so that a
head of 128 leaves half of a matrix unit of 256 idle. Of other kernels what their authors say is taken.
"""

import math
import re

from torch_shard._cost.chips import Chip
from torch_shard._cost.hlo import Array, Instruction, arrays_of

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
    clock = chip.clock or 0.0
    width = min(1.0, min(head.shape[-1] for head in _heads(kernel)) / chip.unit) if _part(kernel) else 1.0
    return clock * max(kernel_flops(kernel) / (REACHED * width * chip.flops), num_bytes / chip.bandwidth)


def kernel_flops(kernel: Instruction) -> float:
    """Of one run: of attention those of keys that are seen, else as its author says; zero if that is not known."""
    if (part := _part(kernel)) is None:
        return float(kernel.find(r'"?cost_estimate"?:\{[^}]*"?flops"?:"?(\d+)') or 0)
    queries, keys = _heads(kernel)
    at_once = part == "dkv" and sum(len(array.shape) >= len(queries.shape) for array in kernel.results) > 2
    return (PRODUCTS[part] + at_once) * math.prod(queries.shape) * keys.shape[-2]  # multiply and add, half is seen


def _part(kernel: Instruction) -> str | None:
    """Which kernel of attention this is; None for others."""
    found = re.search(r"(?:splash|flash)_(?:mha|mqa)_(?:\w*?_)?(fwd|dq|dkv)|flash_(attention)", kernel.name)
    if found is None or len(_heads(kernel)) < 2:
        return None
    return found.group(1) or "fwd"


def _heads(kernel: Instruction) -> list[Array]:
    """Queries and keys."""
    given = arrays_of(kernel.find(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "")
    return [array for array in given if len(array.shape) > 2 and array.dtype in ("bf16", "f32")][:2]
