"""Batches that are objects: taken apart into arrays, and put together for the loss as they were."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH


class Plain:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.scale = x, y, 2

    def inputs(self) -> torch.Tensor:
        return self.x * self.scale


class Slots:
    __slots__ = ("__y", "x")

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.__y = x, y

    @property
    def y(self) -> torch.Tensor:
        return self.__y


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    """It has a hash, and Python's `==`: no constant for that."""

    x: torch.Tensor
    y: torch.Tensor

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Sub(dict[str, torch.Tensor]):
    """A dict with attributes for its keys."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Store:
    """Holds its data a level down, with a way back to what holds it, as batches of graphs do."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.inner = Plain(x, y)
        self.inner.parent = self  # pyright: ignore[reportAttributeAccessIssue]

    x = property(lambda self: self.inner.parent.inner.x)
    y = property(lambda self: self.inner.y)


class Output(BaseModelOutput):
    x = property(lambda self: self.last_hidden_state)
    y = property(lambda self: self.hidden_states[0])


KINDS: dict[str, Callable[..., Any]] = {
    "object": Plain,
    "slots": Slots,
    "dataclass": Record,
    "frozen with a hash": Frozen,
    "named tuple": Pair,
    "subclass of dict": lambda x, y: Sub(x=x, y=y),
    "with a way back": Store,
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "ModelOutput": lambda x, y: Output(last_hidden_state=x, hidden_states=(y,)),
    "in containers": lambda x, y: {"of": [Plain(x, y)], "scale": 2.0},
}


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    scale = 1.0
    if type(batch) is dict:
        batch, scale = batch["of"][0], batch["scale"]
    assert isinstance(batch, (Plain, Slots, Record, Frozen, Pair, Sub, Store, Output, BatchEncoding))
    x = batch.inputs() if isinstance(batch, Plain) else batch["x"] if isinstance(batch, BatchEncoding) else batch.x
    return F.mse_loss(model(x), batch["y"] if isinstance(batch, BatchEncoding) else batch.y) * scale


def test_each_kind_of_batch_counts_in_one_program() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)

    def of_each(model: nn.Module, batch: Any) -> Any:
        losses = {kind: loss_fn(model, part) for kind, part in batch.items()}
        return torch.stack(list(losses.values())).sum(), losses

    step = sgd_step(model, of_each, (4, 2), rate=0.0)
    state = step.init()
    for put in (lambda batch: batch, lambda batch: batch, step.put):
        batch = {kind: make(torch.randn(BATCH, 8), torch.randn(BATCH, 4)) for kind, make in KINDS.items()}
        state, metrics = step(state, put(batch))
        for kind, wanted in of_each(eager, batch)[1].items():
            torch.testing.assert_close(torch.tensor(float(metrics[kind])), wanted.detach(), msg=kind)
    assert step.num_compiles == 1


def test_plain_values_of_an_object_are_a_part_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    step = sgd_step(model, loss_fn, rate=0.0)
    state, batch = step.init(), Plain(torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    with caplog.at_level(logging.INFO):
        for batch.scale in (2, 3):
            state, metrics = step(state, batch)
            torch.testing.assert_close(torch.tensor(float(metrics["loss"])), loss_fn(eager, batch).detach())
    assert "compiles again: in the batch, .scale was 2 and is 3" in caplog.text


class WithIterator(Plain):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x, y)
        self.rows = iter([1, 2, 3])


def test_what_is_no_array_may_be_there_and_is_refused_where_it_is_read() -> None:
    model, batch = nn.Linear(8, 4), WithIterator(torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    wanted = loss_fn(model, batch).detach()
    step = sgd_step(model, loss_fn, rate=0.0)
    _, metrics = step(step.init(), batch)
    torch.testing.assert_close(torch.tensor(float(metrics["loss"])), wanted)
    reads = sgd_step(model, lambda m, b: loss_fn(m, b) * next(b.rows), rate=0.0)
    with refuses(r"reads batch\.rows, of type list_iterator, which is neither an array nor", NotImplementedError):
        reads(reads.init(), batch)


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    step = sgd_step(nn.Linear(8, 4), loss_fn, rate=0.0)
    with refuses(r"batch\['x'\] is of type list_iterator, which is neither an array", TypeError):
        step(step.init(), {"x": iter([1])})
