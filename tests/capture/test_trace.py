"""What a capture means, and refuses."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses

X = torch.tensor([0.5, -1.0, 2.0])


def test_constants_and_devices_inside_forward() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0], device="jax")
        return x * table + torch.arange(3, device=x.device) + torch.ones(3).to("jax")

    wanted = X * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + 1
    torch.testing.assert_close(ts.jax_jit(fn)(X).cpu(), wanted)


def test_custom_functions_hooks_and_func_transforms_mean_what_they_do_in_torch() -> None:
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (ctx.saved_tensors[0].abs() < 1.5)

    def fn(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 10)
        inner = torch.func.grad(lambda y: (y**3).sum())(x)
        slopes = torch.func.vmap(lambda y: y.sin())(x)
        saved = torch.utils.checkpoint.checkpoint(lambda y: y.exp(), x, use_reentrant=False)
        return (Clip.apply(h) * h + inner * slopes + saved).sum()

    x = X.clone().requires_grad_()
    fn(x).backward()
    torch.testing.assert_close(ts.jax_grad(fn)(X).cpu(), x.grad)


def test_two_threads_capture_side_by_side() -> None:
    import concurrent.futures

    models = [nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda m: ts.jax_jit(m)(X).cpu(), models))
    for out, model in zip(found, models, strict=True):
        torch.testing.assert_close(out, model(X))


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()], ids=["random", "numpy"])
def test_python_random_numbers_are_refused(draw: Any) -> None:
    with refuses("draws from Python's `random` or from numpy.random", NotImplementedError):
        ts.jax_jit(lambda x: x * draw())(torch.ones(2))
