"""A function whose derivatives tell torch's from JAX's, and torch's own derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def weighted(outputs: Any) -> torch.Tensor:
    """A number that depends on every entry of every output with another weight."""
    each = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return sum((out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum() for out in each)  # pyright: ignore


def both(fn: Any, inputs: list[torch.Tensor], num: int | None = None, eager: Any = None) -> list[Any]:
    """What a function gives, and gradients by its first inputs: pairs of ours in one program, and of eager torch's."""
    num = len(inputs) if num is None else num

    def with_outputs(*given: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        outputs = fn(*given)
        return weighted(outputs), [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    run = ts.jax_jit(ts.jax_value_and_grad(with_outputs, argnums=tuple(range(num)), has_aux=True))
    (_, found), grads = run(*inputs)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:num]]
    with sdpa_kernel(SDPBackend.MATH):  # others give a bias no gradient
        outputs = (eager or fn)(*leaves, *inputs[num:])
        wanted = torch.autograd.grad(weighted(outputs), leaves, materialize_grads=True)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    pairs = zip((*found, *grads), (*outputs, *wanted), strict=True)
    return [(ours.cpu(), theirs.detach()) for ours, theirs in pairs]


def assert_equals_torch(
    fn: Any, inputs: list[torch.Tensor], num: int | None = None, eager: Any = None, **close: float
) -> None:
    """All of `both` in these tolerances."""
    for ours, theirs in both(fn, inputs, num, eager):
        torch.testing.assert_close(ours, theirs, **close)


def second(fn: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the square of a gradient: ours, and eager torch's."""

    def penalty(x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
            (grad,) = torch.autograd.grad(weighted(fn(x).square()), x, create_graph=True)
        return grad.square().sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(penalty(leaf), leaf)
    return ts.jax_jit(ts.jax_grad(penalty))(x).cpu(), wanted
