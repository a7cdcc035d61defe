"""Arithmetic of products in a compiled program."""

import math
import re

import numpy as np

from torch_shard._cost.hlo import Hlo, Instruction


def flops_of(hlo: Hlo, instruction: Instruction) -> float:
    """Multiplications and additions of a product; zero for what is none."""
    if instruction.op == "dot":
        return _dot(hlo, instruction)
    return _convolution(hlo, instruction) if instruction.op == "convolution" else 0.0


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
