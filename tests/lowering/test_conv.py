"""Convolutions within a step on every mesh; `test_ops.py` has their arguments."""

import pytest
import torch
from torch import nn

from tests.oracles.eager import agrees_with_torch
from tests.tables.cases import BATCH, squared_error


@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4), (1, 8)], ids=str)
def test_grouped_convolutions_have_torchs_gradient_on_every_mesh(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(4, 8, 3, groups=2, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=8, dilation=2))
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(BATCH, 4, 9, 9)
    model(x)
    agrees_with_torch(model, squared_error, [(x, torch.randn(BATCH, 4))], sizes)
