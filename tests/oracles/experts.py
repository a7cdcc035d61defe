"""HF's experts in any dtype and size: PyTorch's own grouped products have no float64, and want aligned rows."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from transformers.integrations import moe


@contextlib.contextmanager
def any_grouped_mm() -> Iterator[None]:
    """Within, HF's own loop over the groups stands for PyTorch's operator in eager torch; captures stay as they are."""
    usual = moe._can_use_grouped_mm

    def can_use(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return isinstance(weight, FakeTensor) and usual(x, weight, offs)

    with mock.patch.object(moe, "_can_use_grouped_mm", can_use):
        yield
