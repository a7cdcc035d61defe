"""What an adapted function closes over: read at each call, and differentiated."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.derivatives import X, assert_close, torch_grad


def test_closed_over_parameters_are_read_at_each_call() -> None:
    model = nn.Linear(3, 2)
    fn = ts.jax_jit(lambda x: model(x))
    assert_close(fn(X), model(X))
    with torch.no_grad():
        model.weight.add_(1)
    assert_close(fn(X), model(X))
    model.to("jax")
    assert_close(fn(X), model.to("cpu")(X))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.vmap])
def test_torchs_own_transforms_of_what_closes_over_parameters(transform: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = model(x).sin()
        return out if transform is torch.vmap else out.sum()

    x = torch.randn(3, 4)
    torch.testing.assert_close(ts.jax_jit(transform(fn))(x).cpu(), transform(fn)(x).detach())


LOOPS = {
    "given": lambda view, x: ts.call_jax(jax.lax.fori_loop, 0, 3, view, x),
    "within": lambda view, x: ts.call_jax(lambda x: jax.lax.fori_loop(0, 3, view, x), x),
    "jit": lambda view, x: ts.call_jax(lambda x: jax.jit(view)(2, jax.jit(view)(1, jax.jit(view)(0, x))), x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_jax_over_torch_functions_read_what_these_close_over(name: str) -> None:
    """JAX keeps the trace of a body by its identity, and with it the values of the first call."""
    fn = ts.jax_view(lambda x, w: LOOPS[name](ts.jax_view(lambda i, c: c * w), x))
    compiled = jax.jit(lambda x, w: fn(x, w))
    x = jnp.ones(2)
    for run in (fn, compiled):
        for w in (2.0, 3.0):
            assert run(x, x * w).tolist() == [w**3] * 2
    grad = jax.grad(lambda w: fn(x, w).sum())
    assert grad(x * 2).tolist() == [12.0] * 2
    assert jax.jit(grad)(x * 3).tolist() == [27.0] * 2


class Sine(torch.autograd.Function):
    """Its own derivative is twice torch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0].cos()


UNSEEN = {
    "autograd.Function": Sine.apply,
    "vmap": lambda w: torch.func.vmap(lambda row, w: row * w.sum(), in_dims=(0, None))(w, w),
    "grad": torch.func.grad(lambda w: (w.sin() * w).sum()),
    "vjp": lambda w: torch.func.vjp(torch.sin, w)[1](w)[0],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_closed_over_has_its_gradient_where_no_torch_function_is_called(name: str) -> None:
    def loss(adapt: Any, w: torch.Tensor) -> torch.Tensor:
        return (adapt(lambda x: UNSEEN[name](w) * x)(X) ** 2).sum()

    assert_close(ts.jax_grad(lambda w: loss(ts.jax_jit, w))(X), torch_grad(lambda w: loss(lambda f: f, w), X))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_eager_gradients_reach_what_an_adapted_function_closes_over(device: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(2, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x)[torch.tensor([0, 1, 0])].square().sum()

    leaf = x.clone().requires_grad_()
    model.eval()
    wanted = torch.autograd.grad(loss(leaf), [leaf, *model.parameters()])
    model.to(device)
    fn = ts.jax_jit(loss)
    for _ in range(2):
        leaf = x.to(device).clone().requires_grad_()
        found = torch.autograd.grad(fn(leaf), [leaf, *model.parameters()])
        for f, w in zip(found, wanted, strict=True):
            assert f.device.type == leaf.device.type
            assert_close(f, w)
    model.train()
    dropped = torch.stack([fn(leaf).detach().cpu() for _ in range(8)])
    assert len(dropped.unique()) > 1


def test_literals_of_functions_that_close_over_what_is_differentiated() -> None:
    def loss(jit: Any, c: torch.Tensor) -> torch.Tensor:
        inner = jit(lambda x: torch.zeros(4, 3).index_put((torch.tensor([0, 1]),), c).square().sum() + x)
        return inner(c.sum())

    assert_close(ts.jax_grad(lambda c: loss(ts.jax_jit, c))(X), torch_grad(lambda c: loss(lambda f: f, c), X))
