"""Where Python asks a tensor for its value to decide about something, which is refused."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts

X = torch.tensor([0.5, -1.0, 2.0])


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (Chooses(), r"in forward: if x\.sum\(\) > 0:"),
        (lambda x: x * x.sum().item(), r"item\(\)"),
        (lambda x: x.tolist()[0] + x, r"tolist\(\)"),
        (lambda x: x + float(x[0]), r"float\("),
        (lambda x: x[x > 0], r"x\[x > 0\]"),
        (lambda x: torch.nonzero(x), r"nonzero"),
        (lambda x: x.numpy().sum() + x, r"numpy"),
    ],
)
def test_values_that_python_needs_are_refused_with_file_and_line(fn: Any, what: str) -> None:
    with pytest.raises(NotImplementedError, match=rf'File "{re.escape(__file__)}", line \d+, .*{what}') as caught:
        ts.jax_jit(fn)(X)
    assert "torch.where" in str(caught.value)
    assert "torch.cond" in str(caught.value)


def test_where_chooses_by_value() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum() > 0, x.sin(), x.cos())

    for x in (X, -X):
        torch.testing.assert_close(ts.jax_jit(fn)(x).cpu(), fn(x))
