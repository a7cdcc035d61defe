"""Memory of compiled steps, as XLA accounts for it: what is computed again is not kept, and the state is donated."""

import functools
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.cases import WHOLE, make_mesh, sgd_step

DEPTH, WIDTH, HEADS, LENGTH, BATCH = 16, 32, 4, 32, 8


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def _with_softmax() -> nn.Module:
    """What is no product and not elementwise either is kept, or computed again, apart from both."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@functools.cache
def _compiled(make: Callable[[], nn.Module] = Layer, depth: int = DEPTH, **options: Any) -> Any:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(make() for _ in range(depth))), torch.randn(BATCH, LENGTH, WIDTH)
    options = {"mesh": make_mesh((1, 1)), "plan": WHOLE, **options}
    step = sgd_step(model, _loss, optax.sgd(1e-3, momentum=0.9), **options)
    return step.lower(step.init(seed=0), batch).compile()


def _temp(*args: Any, **options: Any) -> int:
    return _compiled(*args, **options).memory_analysis().temp_size_in_bytes


def _total(**options: Any) -> int:
    memory = _compiled(_with_softmax, 4, **options).memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return sizes - memory.alias_size_in_bytes


def test_what_is_computed_again_is_not_kept() -> None:
    assert _temp(remat="block") <= 0.35 * _temp(remat="none")


def test_microbatches_need_the_memory_of_one() -> None:
    gradients = sum(p.numel() * p.element_size() for p in _small().parameters()) * DEPTH
    assert _temp(_small, accumulate_steps=4) <= _temp(_small) / 4 + 2 * gradients  # theirs, and their sums


@pytest.mark.slow
def test_a_budget_picks_the_fastest_that_fits() -> None:
    none, dots, block = (_total(remat=choice) for choice in ("none", "dots", "block"))
    assert block < dots < none
    for budget, wanted in ((none, none), (none - 1, dots), (dots - 1, block)):
        assert _total(remat=budget) == wanted
    with pytest.raises(ValueError, match=rf"no choice of remat fits into {block - 1} bytes .*'block' takes {block}"):
        _total(remat=block - 1)


def test_the_state_is_donated() -> None:
    """All of it becomes the new state: there is no second copy of parameters or moments."""
    memory = _compiled(_small).memory_analysis()
    state = 2 * sum(p.numel() * p.element_size() for p in _small().parameters()) * DEPTH
    batch = BATCH * LENGTH * WIDTH * 4
    assert memory.alias_size_in_bytes >= state
    assert memory.argument_size_in_bytes <= state + batch + 64  # the count of steps, and a key
    assert memory.output_size_in_bytes <= memory.alias_size_in_bytes + 1024  # metrics, and where each array is
