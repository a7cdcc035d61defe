"""What forward leaves in caches within a capture stands for its values afterwards: eager torch goes on with it."""

import collections
import functools
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.tables.cases import BATCH, squared_error

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
    """Each layer by a cache of another kind, and all of them twice."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__()
        self.layers, self.caches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 * len(caches))), caches
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, cache in zip(self.layers, 2 * self.caches, strict=True):
            angles = cache(x.shape[1])
            x = layer(x * angles.cos + x.flip(1) * angles.sin).tanh()
        return self.out(x)


def test_a_cache_holds_values_after_a_capture() -> None:
    torch.manual_seed(0)
    caches = [by_hand, few, all_sizes, in_object()]
    model, batch = Rotated(caches), (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    agrees_with_torch(model, squared_error, [batch] * 2, (4, 2))  # the eager run meets what the capture has left
    for cache in caches:
        assert torch.equal(cache(8).cos, torch.arange(8).cos())


def test_a_cache_that_an_adapter_fills() -> None:
    few.cache_clear()
    ts.jax_jit(lambda x: x * few(3).cos)(torch.ones(3))
    assert torch.equal(few(3).cos, torch.arange(3).cos())


def test_a_cache_that_a_failed_capture_fills() -> None:
    few.cache_clear()
    with pytest.raises(NotImplementedError):
        ts.jax_jit(lambda x: x * few(3).cos * x.sum().item())(torch.ones(3))
    assert torch.equal(few(3).cos, torch.arange(3).cos())


def test_what_stays_where_nobody_looks() -> None:
    class Slot:
        __slots__ = ("table",)

    slot = Slot()

    def fills(x: torch.Tensor) -> torch.Tensor:
        slot.table = torch.arange(4.0)
        return x + slot.table

    ts.jax_jit(fills)(torch.ones(4))
    x = torch.ones(4, requires_grad=True)
    (x * slot.table).sum().backward()
    assert x.grad is not None
    assert type(x.grad) is torch.Tensor
    assert torch.equal(x.grad, torch.arange(4.0))
    slot.table.add_(1)
    assert slot.table.tolist() == [1, 2, 3, 4], "what is written stays"
    assert torch.equal(ts.jax_jit(lambda x: x + slot.table)(torch.zeros(4)).cpu(), slot.table * 1)


def test_nothing_that_belongs_to_others_is_rewritten() -> None:
    few.cache_clear()
    BY_SIZE.clear()
    held: list[Any] = []

    def fills(x: torch.Tensor) -> torch.Tensor:
        held.append(by_hand(3)[0])
        return x * few(3).cos * held[0]

    ts.jax_jit(fills)(torch.ones(3))
    assert few.cache_info().currsize == 1
    assert held[0] is BY_SIZE[3][0][0]


def test_a_tensor_without_a_value_is_refused_where_it_is_read() -> None:
    held: list[torch.Tensor] = []

    def fills(x: torch.Tensor) -> torch.Tensor:
        held.append(x * 2)
        return x + 1

    ts.jax_jit(fills)(torch.ones(4))
    wanted = r"(?s)test_leftovers.py.*line.*earlier capture left behind.*never had.*lru_cache.*eager torch before"
    with pytest.raises(NotImplementedError, match=wanted):
        held[0] + torch.ones(4)
    with pytest.raises(NotImplementedError, match=wanted):
        held[0].sum().item()


def test_an_operator_that_raises_has_not_happened_where_its_error_is_caught() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        try:
            total = total[:4]
        except (IndexError, RuntimeError):
            total = total + 1
        return x * total

    x = torch.arange(3.0)
    torch.testing.assert_close(ts.jax_jit(fn)(x).cpu(), fn(x))
