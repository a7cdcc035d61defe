"""Captures that start again: the user's code sees nothing of it, and the numbers are those of eager torch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.scan.test_rolled import Seen
from tests.tables.cases import Case, chosen, regression, squared_error
from tests.tables.layered import with_sizes
from tests.tables.layers import WIDTH, Block, Stack
from tests.tables.layers_with_effects import Remembering
from torch_shard._scan.siblings import LeftBehind

SEEN = Seen()


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


class Leaving(Remembering):
    """Asks for the value of a tensor that it knows, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.tensor(2).item() == 2
        return super().forward(x)


class Hooked(Block):
    """Has a hook on what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: 0.5 * grad)
        return y


class Full(Block):
    """Leaves several tensors behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.left = [y.mean(), y.square().mean(), y.abs().mean()]
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


GUARDED = {
    "an error of the first": (_guarded(Failing, (FAILS, 1.0, 1.0)), squared_error),
    "an error of a later one": (_guarded(Failing, (1.0, 1.0, FAILS)), squared_error),
    "hooks": (_guarded(Hooked), squared_error),
    "tensors left behind": (_guarded(Leaving), with_sizes),
    "other programs, and parameters used outside": (_guarded(Block, (1.0, 0.5)), _with_decay),
}


OFTEN = ("an error of a later one", "hooks", "tensors left behind")


@pytest.mark.parametrize("name", chosen(GUARDED, OFTEN))
def test_a_model_that_catches_everything_sees_only_its_own_errors(name: str) -> None:
    SEEN.clear()
    build, loss_fn = GUARDED[name]
    case = Case(name, build, regression(WIDTH, out=WIDTH), {}, loss_fn=loss_fn)
    assert_follows(case, case.model(), eager_trajectory(case, 2), (4, 2))
    assert SEEN == []


def test_all_tensors_that_layers_leave_behind_are_learned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    learn = LeftBehind.learn
    monkeypatch.setattr(
        LeftBehind, "learn", lambda self, groups: learned.append(len(self.tensors)) or learn(self, groups)
    )

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return squared_error(model, batch) + sum(sum(block.left) for block in model.blocks)  # pyright: ignore

    case = Case("full", lambda: Stack(Full), regression(WIDTH, out=WIDTH), {}, loss_fn=loss_fn)
    assert_follows(case, case.model(), eager_trajectory(case, 1), (1, 1))
    assert learned == [3]
