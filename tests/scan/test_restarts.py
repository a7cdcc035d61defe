"""Captures that start again: the user's code sees nothing of it, and the numbers are those of eager torch."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import Case, regression, squared_error
from tests.tables.layered import LAYERED, Layered
from tests.tables.layers import WIDTH, Block, Stack


class Seen(list[BaseException]):
    """A list that a capture does not put back: it knows Python's own containers only."""


SEEN = Seen()

STARTING_AGAIN = {
    "alternating": "a call is another program",
    "passed on": "the first call is another program",
    "a second result of one": "the loss depends on other results",
    "a list": "left behind",
    "handed over": "left behind by one layer, used by the next",
    "left behind by two": "left behind, and other programs",
    "a rule that reads late": "refused in the backward pass",
    "a view": "refused after the layer has run",
    "hooks on the graph": "refused while the layer runs",
    "given a list": "lists that layers are given",
    "records and rules": "records",
    "reentrant checkpoint": "called again in the backward pass",
    "second derivative": "refused in a backward pass that the loss asks for",
}


def _watched(case: Case) -> Case:
    """The same, with a loss that catches whatever is thrown through it."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return case.loss_fn(model, batch)
        except BaseException as error:
            SEEN.append(error)
            raise

    return dataclasses.replace(case, loss_fn=loss_fn)


class Guarded(Stack):
    """Catches whatever comes out of a block, and goes on without that block if it is the user's own error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            try:
                x = block(x)
            except ValueError:
                x = 0.5 * x
            except BaseException as error:
                SEEN.append(error)
                raise
        return x


class Failing(Block):
    """One of them raises an error when it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.scale == FAILS:
            raise ValueError("out of range")
        return y


class Leaving(Block):
    """Leaves a tensor to whoever wants it, and asks for the value of one that it knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = x.square().mean()
        assert torch.tensor(2).item() == 2
        return super().forward(x)


class Hooked(Block):
    """Has a hook on what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: 0.5 * grad)
        return y


FAILS = 3.0


def _guarded(block: Callable[[], nn.Module], scales: Sequence[float] = (1.0,)) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Guarded(block, depth=6)
        for member, scale in zip(model.blocks, itertools.cycle(scales), strict=False):
            member.scale = scale  # pyright: ignore[reportArgumentType]
        return model

    return build


def _with_decay(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) + sum(p.square().sum() for p in model.blocks.parameters())  # pyright: ignore


def _with_sizes(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) + sum(block.size for block in model.blocks)  # pyright: ignore


GUARDED = [
    ("another program", _guarded(Block, (1.0, 0.5)), squared_error),
    ("an error of the first", _guarded(Failing, (FAILS, 1.0, 1.0)), squared_error),
    ("an error of a later one", _guarded(Failing, (1.0, 1.0, FAILS)), squared_error),
    ("hooks", _guarded(Hooked), squared_error),
    ("parameters used outside", _guarded(Block), _with_decay),
    ("tensors left behind", _guarded(Leaving), _with_sizes),
    ("other programs, and parameters used outside", _guarded(Block, (1.0, 0.5)), _with_decay),
]


@pytest.mark.parametrize(("name", "build", "loss_fn"), GUARDED, ids=[row[0] for row in GUARDED])
def test_a_model_that_catches_everything_sees_only_its_own_errors(name: str, build: Any, loss_fn: Any) -> None:
    SEEN.clear()
    case = Case(name, build, regression(WIDTH, out=WIDTH), {}, loss_fn=loss_fn)
    assert_follows(case, case.model(), eager_trajectory(case, 2), (4, 2))
    assert SEEN == []


ROWS = [row for row in LAYERED if row.case.name in STARTING_AGAIN]


@pytest.mark.parametrize(
    "layered", [pytest.param(r, id=r.case.name, marks=pytest.mark.slow if i % 2 else []) for i, r in enumerate(ROWS)]
)
def test_nothing_is_thrown_through_the_users_code(layered: Layered) -> None:
    SEEN.clear()
    case = _watched(layered.case)
    step = assert_follows(case, case.model(), eager_trajectory(case, 2), (4, 2))
    assert SEEN == []
    assert layered.says in step.report()
