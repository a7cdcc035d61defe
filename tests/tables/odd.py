"""Operators that PyTorch can run on the CPU and that nobody lowers to JAX."""

import torch

LIBRARY = torch.library.Library("tests", "DEF")
for _name in ("odd", "odd_backward"):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, lambda x: x + 1, "CPU")
    torch.library.register_fake(f"tests::{_name}", torch.empty_like, lib=LIBRARY)


class _Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests.odd(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests.odd_backward(grad)


odd = _Odd.apply
