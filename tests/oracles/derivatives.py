"""A function whose derivatives tell torch's from JAX's, and torch's own derivative."""

from typing import Any

import torch

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32, sums in another order


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **CLOSE)


def wavy(x: torch.Tensor) -> torch.Tensor:
    """Its derivatives differ where torch cuts them: detach and no_grad."""
    with torch.no_grad():
        weight = x.cos()
    return (x.sin() * weight * x * x.detach()).sum()


X = torch.tensor([0.3, -1.2, 2.0])


def torch_grad(fn: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, create_graph=True)[0]
