"""Caches that forward fills within a capture hold real tensors afterwards, so that eager torch goes on with them."""

import collections
import functools
import gc
from typing import Any

import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.tables.cases import BATCH, WHOLE, make_mesh, squared_error

BY_SIZE: dict[int, Any] = {}

Angles = collections.namedtuple("Angles", ["cos", "sin"])


def by_hand(size: int) -> Angles:
    """Behind a function, in a dict of tuples."""
    if size not in BY_SIZE:
        BY_SIZE[size] = (Angles(torch.arange(size).cos(), torch.arange(size).sin()), "a note")
    return BY_SIZE[size][0]


@functools.lru_cache
def few(size: int) -> Angles:
    return Angles(torch.arange(size).cos(), torch.arange(size).sin())


@functools.cache
def all_sizes(size: int) -> Angles:
    return Angles(torch.arange(size).cos(), torch.arange(size).sin())


class Holder:
    """An object in a closure."""

    table: Any = None


def in_object(holder: Holder = Holder()) -> Any:  # noqa: B008
    def angles(size: int) -> Angles:
        holder.table = holder.table or Angles(torch.arange(size).cos(), torch.arange(size).sin())
        return holder.table

    return lambda size: angles(size)


class Rotated(nn.Module):
    def __init__(self, angles: Any) -> None:
        super().__init__()
        self.layers, self.angles = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), [angles]
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            angles = self.angles[0](x.shape[1])
            x = layer(x * angles.cos + x.flip(1) * angles.sin).tanh()
        return self.out(x)


@pytest.mark.parametrize("angles", [by_hand, few, all_sizes, in_object()], ids=["dict", "lru", "cache", "object"])
def test_a_cache_holds_values_after_a_capture(angles: Any) -> None:
    torch.manual_seed(0)
    model, batch = Rotated(angles), (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((4, 2)), plan=WHOLE)
    step(step.init(), batch)
    assert type(angles(8).cos) is torch.Tensor
    assert torch.equal(angles(8).cos, torch.arange(8).cos())
    agrees_with_torch(model, squared_error, [batch] * 2, (1, 1))


def test_a_cache_that_an_adapter_fills() -> None:
    few.cache_clear()
    ts.jax_jit(lambda x: x * few(3).cos)(torch.ones(3))
    assert torch.equal(few(3).cos, torch.arange(3).cos())


def test_a_cache_that_a_failed_capture_fills() -> None:
    few.cache_clear()
    with pytest.raises(NotImplementedError):
        ts.jax_jit(lambda x: x * few(3).cos * x.sum().item())(torch.ones(3))
    assert torch.equal(few(3).cos, torch.arange(3).cos())


def test_what_stays_where_it_cannot_be_replaced_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slot:
        __slots__ = ("table",)

    slot, searches, collect = Slot(), [0], gc.collect

    def counted() -> int:
        searches[0] += 1
        return collect()

    def fills(x: torch.Tensor) -> torch.Tensor:
        slot.table = torch.arange(4.0)
        return x + slot.table

    monkeypatch.setattr(gc, "collect", counted)
    ts.jax_jit(fills)(torch.ones(4))
    assert searches == [1]
    for scale in (2, 3):
        ts.jax_jit(lambda x, scale=scale: x * scale)(torch.ones(4))
    assert searches == [1]
