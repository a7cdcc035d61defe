"""ATen operators by what they do to values: move none, look at them in other dims, make them, multiply them.

By name where all overloads of an operator do the same. What autocast runs in which precision is another question, whose
answers are PyTorch's (`autocast_policy.py`): about functions as users call them (`conv2d`), not as captures hold them.
"""

import torch
from torch.fx import Node

from torch_shard._common.fx import aten_name

aten = torch.ops.aten

COPIES = frozenset({"clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous"})
"""Nothing happens to values and shape; `_to_copy` is not among them, as it may round."""

DIM_VIEWS = frozenset(
    {"t", "transpose", "permute", "unsqueeze", "squeeze", "expand"}
    | {"select", "slice", "split", "split_with_sizes", "unbind"}
)
"""Dims come, go and change places, or a part of them is looked at."""

STRICT_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Dims are cut anew, if strides allow it; by overload, as `aten.view.dtype` reads the bits anew."""

RESHAPES = (*STRICT_VIEWS, aten.reshape.default)
"""Dims are cut anew, whatever the strides: in a functional graph all three do the same."""

FILLS = frozenset({"full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "scalar_tensor"})
"""One number everywhere, known without any tensor's values."""

MATRIX_PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
"""Products of the last two dims, and where their two factors begin in the arguments."""

PRODUCTS = frozenset({*MATRIX_PRODUCTS, "linear", "tensordot", "convolution", "einsum"})
"""Sums of products, along whichever dims."""

SCATTERS = frozenset(
    {"scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce", "put"}
    | {"index_put", "_unsafe_index_put", "bincount"}
)
"""Values are written, or added, where indices say; all but `bincount` have what is written to as first argument."""

REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "logsumexp", "prod", "any", "all", "argmax", "argmin"})
"""One result instead of all elements along some dims, which are the second argument."""


def is_pointwise(node: Node) -> bool:
    """Tell whether an operator does the same to each element."""
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return aten_name(node) != "" and (tagged or aten_name(node) in COPIES or aten_name(node) == "_to_copy")
