"""Memory of compiled steps, as XLA accounts for it: what is computed again is not kept, and the state is donated."""

import functools
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
from torch import nn

from tests.oracles.steps import step_of
from tests.tables.cases import WHOLE, Block, make_mesh

DEPTH, WIDTH, HEADS, LENGTH, BATCH = 16, 32, 4, 32, 8


def _layer() -> nn.Module:
    return Block(WIDTH, HEADS)


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def _with_softmax() -> nn.Module:
    """What is no product and not elementwise either is kept, or computed again, apart from both."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@functools.cache
def _compiled(make: Callable[[], nn.Module] = _layer, depth: int = DEPTH, **options: Any) -> Any:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(make() for _ in range(depth))), torch.randn(BATCH, LENGTH, WIDTH)
    options = {"mesh": make_mesh((1, 1)), "plan": WHOLE, **options}
    step = step_of(model, _loss, optax.sgd(1e-3, momentum=0.9), **options)
    return step.lower(step.init(seed=0), batch).compile()


def _temp(*args: Any, **options: Any) -> int:
    return _compiled(*args, **options).memory_analysis().temp_size_in_bytes


def _total(**options: Any) -> int:
    memory = _compiled(_with_softmax, 4, **options).memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return sizes - memory.alias_size_in_bytes


def test_what_is_computed_again_is_not_kept() -> None:
    assert _temp(remat="block") <= 0.4 * _temp(remat="none")  # a third, and what XLA:CPU's fusions hold


def test_microbatches_need_the_memory_of_one() -> None:
    gradients = sum(p.numel() * p.element_size() for p in _small().parameters()) * DEPTH
    assert _temp(_small, accumulate_steps=4) <= _temp(_small) / 4 + 2 * gradients  # theirs, and their sums


@pytest.mark.slow
def test_a_budget_picks_the_fastest_that_fits() -> None:
    none, dots, block = (_total(remat=choice) for choice in ("none", "dots", "block"))
    assert block < dots < none
    assert _total(remat=none - 1) == dots
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
