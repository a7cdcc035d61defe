"""Gradients that land in `.grad` before or beside the loss's own: they count, as in eager torch."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.errors import refuses
from tests.tables.semantics import WIDTH, built


class RunsAgain(torch.autograd.Function):
    """A checkpoint as reversible nets write it: gradients of the block are accumulated by a backward of its own."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, dy)
        return x.grad, None


class AddsByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        found = dy.t() @ ctx.saved_tensors[0]
        ctx.weight.grad = found if ctx.weight.grad is None else ctx.weight.grad + found
        return dy @ ctx.weight, None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Reversible(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RunsAgain.apply(self.a(x), self.b)


class OfTheInput(Two):
    """The block is reached only by a backward pass that runs all of the graph, as `loss.backward()` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RunsAgain.apply(x.clone().requires_grad_(), self.b) + self.a(x)


class ByHand(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AddsByHand.apply(AddsByHand.apply(self.a(x), self.b.weight), self.b.weight)


class Regularised(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.a.weight.square().sum() * 0.1).backward()
        norm = self.a.weight.grad.norm()
        self.a.weight.grad *= 2
        return self.b(self.a(x)) * norm


def stack(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(build() for _ in range(3)))


BUILDS = [OfTheInput, Regularised, stack(Reversible), stack(ByHand)]


@pytest.mark.parametrize("build", BUILDS, ids=["of the input", "regularised", "runs again", "by hand"])
def test_they_count_and_the_model_gets_none(build: Callable[[], nn.Module]) -> None:
    case = built(build)
    model = case.model()
    assert_follows(case, model, eager_trajectory(case, 2), (4, 2))
    for p in model.parameters():
        with refuses("there is no gradient of an eager backward pass, .*clip_grad_norm", RuntimeError):
            p.grad  # noqa: B018


def test_an_adapter_has_no_place_for_them() -> None:
    model = nn.Linear(WIDTH, 1)
    with pytest.raises(
        NotImplementedError, match=r"leaves gradients in \.grad of .* \(1, 8\), \(1,\).*jax_value_and_grad"
    ):
        ts.jax_jit(lambda x: model(x).sum().backward())(torch.ones(2, WIDTH))
    assert model.weight.grad is None
