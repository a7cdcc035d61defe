"""A function whose derivatives tell torch's from JAX's, and torch's own derivative."""

from collections.abc import Callable
from typing import Any

import torch

import torch_shard as ts

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32, sums in another order


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **CLOSE)


def wavy(x: torch.Tensor) -> torch.Tensor:
    """Its derivatives differ where torch cuts them: detach and no_grad."""
    with torch.no_grad():
        weight = x.cos()
    return (x.sin() * weight * x * x.detach()).sum()


X = torch.tensor([0.3, -1.2, 2.0])


def agrees(fn: Callable[..., torch.Tensor], *args: torch.Tensor, **tolerance: float) -> None:
    """Value of a function, and its gradient by the first argument, as in eager torch."""
    x = args[0].clone().requires_grad_()
    wanted = fn(x, *args[1:])
    (wanted_grad,) = torch.autograd.grad(wanted, x)
    found, grad = ts.jax_value_and_grad(fn)(*args)
    tolerance = tolerance or CLOSE
    torch.testing.assert_close(found.cpu(), wanted.detach(), equal_nan=True, **tolerance)
    torch.testing.assert_close(grad.cpu(), wanted_grad, equal_nan=True, **tolerance)


def torch_grad(fn: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, create_graph=True)[0]
