"""Products of tensors of two dtypes, which PyTorch's kernels refuse, and its rules for fake tensors let pass."""

import torch

from torch_shard._capture.provenance import current_user_line
from torch_shard._common.types import Operator, PyTree

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.linear.default}
    | {aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.convolution.default}
)


def check_one_dtype(func: Operator, args: PyTree) -> None:
    """Refuse a product that eager torch refuses.

    Raises:
        RuntimeError: As torch raises one, with the user's line.
    """
    if func not in _PRODUCTS:
        return
    dtypes = list(dict.fromkeys(str(arg.dtype) for arg in args if isinstance(arg, torch.Tensor)))
    if len(dtypes) > 1:
        raise RuntimeError(
            f"{current_user_line()}\n{func} must be given tensors of one dtype, as in eager torch; found "
            f"{' and '.join(dtypes)}. Cast one of them, as in x.to(weight.dtype), or let compute_dtype= or "
            "torch.autocast do it."
        )
