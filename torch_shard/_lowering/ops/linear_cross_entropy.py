"""`linear_cross_entropy` (torch 2.13 on) without chunks: XLA chunks as it sees fit."""

from typing import Any

import torch
import torch.nn.functional as F

from torch_shard._common.overrides import instead_of


def whole(*args: Any, options: object = None, **kwargs: Any) -> torch.Tensor:
    """The loss by PyTorch's own reference, whatever the options of its chunks."""
    return F.linear_cross_entropy(*args, **kwargs)


if hasattr(F, "linear_cross_entropy"):
    instead_of(F.linear_cross_entropy)(whole)
