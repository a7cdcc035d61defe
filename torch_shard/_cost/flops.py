"""Arithmetic of products in a compiled program."""

import math
import re

from torch_shard._cost.hlo import Hlo, Instruction, arrays_of


def flops_of(hlo: Hlo, instruction: Instruction) -> float:
    """Multiplications and additions of a product; zero for what is none."""
    if instruction.op == "dot":
        return _dot(hlo, instruction)
    return _convolution(hlo, instruction) if instruction.op == "convolution" else 0.0


def _shape(hlo: Hlo, name: str) -> tuple[int, ...]:
    return arrays_of(hlo.types[name])[0].shape


def _dot(hlo: Hlo, dot: Instruction) -> float:
    left = _shape(hlo, dot.operands[0])
    dims = dot.find(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return 2.0 * math.prod(dot.results[0].shape) * math.prod(left[int(dim)] for dim in dims.split(",") if dim)


def _convolution(hlo: Hlo, instruction: Instruction) -> float:
    """Taps that meet padding or the holes of a dilated input do not count."""
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.attributes)
    if labels is None:
        return 0.0
    left_dims, right_dims, out_dims = labels.groups()
    left, right = (_shape(hlo, name) for name in instruction.operands[:2])
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

    size, stride = setting("size", 1), setting("stride", 1)
    spread, dilation = setting("lhs_dilate", 1), setting("rhs_dilate", 1)
    low = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
    count = 0
    for tap in range(size):
        shift = tap * dilation - low
        if spread == 1:
            first, last = max(0, -(shift // stride)), min(num_out - 1, (num_in - 1 - shift) // stride)
            count += max(0, last - first + 1)
        else:
            places = (out * stride + shift for out in range(num_out))
            count += sum(1 for place in places if 0 <= place <= (num_in - 1) * spread and place % spread == 0)
    return count
