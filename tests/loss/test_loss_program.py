"""How long captured losses live: as long as a step uses them."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.oracles.steps import sgd_step


class Trainer:
    """The loss is a method of what holds the model."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        self.step = sgd_step(self.model, self.loss)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().mean()


def run(step: Any) -> None:
    state = step.init()
    for _ in range(2):
        state, _ = step(state, torch.ones(8, 8))


def by_method() -> list[object]:
    trainer = Trainer()
    run(trainer.step)
    return [trainer, trainer.model]


def by_closure() -> list[object]:
    model = nn.Linear(8, 8)
    step = sgd_step(model, lambda given, batch: model(batch).square().mean())
    run(step)
    return [model, step]


def by_global() -> list[object]:
    vars(HELD)["model"] = nn.Linear(8, 8)
    step = sgd_step(HELD.model, lambda given, batch: HELD.model(batch).square().mean())
    run(step)
    return [vars(HELD).pop("model"), step]


class Held:
    model: Any


HELD = Held()


@pytest.mark.parametrize("make", [by_method, by_closure, by_global])
def test_what_is_dropped_goes_away(make: Any) -> None:
    found = [weakref.ref(value) for _ in range(2) for value in make()]
    gc.collect()
    assert [ref() for ref in found] == [None] * len(found)


def test_steps_of_one_loss_share_a_capture() -> None:
    captures = np.zeros(1)  # lists get what is appended at each step

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        captures[0] += 1
        return model(batch).square().mean()

    model = nn.Linear(8, 8)
    first = sgd_step(model, loss, look_again=False)
    run(first)
    before = captures[0]
    run(sgd_step(model, loss, look_again=False))
    assert captures[0] == before > 0
