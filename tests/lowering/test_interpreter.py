"""Operators without a lowering are named before anything compiles."""

import re

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.tables.odd import odd

X = torch.tensor([0.5, -1.0, 2.0])


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests.odd_backward(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return odd(self.blocks[1](x))


def test_missing_lowerings_are_named_together_before_compiling() -> None:
    with pytest.raises(NotImplementedError, match="Outer uses 2 operators without a lowering") as caught:
        ts.jax_jit(Outer())(X)
    first, second = str(caught.value).split("\n\n")[1].splitlines()
    where = r"Outer\.blocks\.1: File .*test_interpreter.*odd_backward\(x\)"
    assert re.match(rf"  tests\.odd_backward\.default: {where}", first)
    assert re.match(r"  tests\.odd\.default: Outer: File .*odd\.py.*tests\.odd\(x\)", second)
