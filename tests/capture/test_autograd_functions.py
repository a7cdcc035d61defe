"""Tensors without stand-ins in an `autograd.Function`: an error, as their gradients would be lost."""

import pytest
import torch

import torch_shard as ts
from torch_shard._capture import autograd_functions


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_tensor_that_nothing_stands_for_is_refused_by_the_name_of_the_function(monkeypatch):
    w, held = torch.ones(4, requires_grad=True), [Double.apply]
    monkeypatch.setattr(autograd_functions, "_takers", lambda: iter(()))  # as in torch without `unwrap_if_dead`

    def gradient(x):
        return torch.autograd.grad((held[0](w) * x).sum(), [w])[0]

    refused = (
        r"File .*in gradient: return torch.autograd.*\nHere is a .* shape \(4,\) .* autograd.Function Double as it is"
    )
    with pytest.raises(NotImplementedError, match=refused):
        ts.jax_jit(gradient)(torch.ones(4))
