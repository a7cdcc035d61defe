"""Texts in a batch, as data loaders give them: ids of rows, names of files, the name of a task."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.oracles.steps import step_of


def batch_of(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    ids = [f"{number}_{row}" for row in range(8)]
    task, scale = [("a", ""), ("b", "3")][number % 2]
    return {"x": torch.randn(8, 4, generator=generator), "ids": ids, "task": task, "scale": scale}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def moved(model: nn.Module, batch: Any) -> torch.Tensor:
    found = {name: v.to("cpu") if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
    assert isinstance(found["task"], str)
    assert not hasattr(found["task"], "to")
    return loss_of(model, copy.deepcopy(found))


def by_task(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * {"a": 1.0, "b": 2.0}[batch["task"]]


def by_prefix(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * (2.0 if batch["ids"][0].startswith("2") else 1.0)


def in_c(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * (2.0 if "2_7" in "".join(batch["ids"]) else 1.0)


def by_type(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * (len(batch["task"] * 2) if type(batch["task"]) is str else 1.0)


def caught(model: nn.Module, batch: Any) -> torch.Tensor:
    try:
        return loss_of(model, batch) * float(batch["scale"])
    except (TypeError, ValueError):
        return loss_of(model, batch)


LOSSES = {loss_of: 1, moved: 1, by_task: 2, by_prefix: 4, in_c: 4, by_type: 2, caught: 2}


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda fn: fn.__name__)
def test_a_program_is_for_all_texts_that_the_loss_does_not_read(loss_fn: Callable[..., torch.Tensor]) -> None:
    model = nn.Linear(4, 2)
    reference, step = copy.deepcopy(model), step_of(model, loss_fn)
    sgd, state = torch.optim.SGD(reference.parameters(), 0.1), step.init()
    for number in range(4):
        batch = batch_of(number)
        if loss_fn in (by_task, by_type, caught):
            del batch["ids"]
        state, metrics = step(state, batch)
        sgd.zero_grad()
        loss = loss_fn(reference, batch)
        loss.backward()
        sgd.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)  # float32, a few sums
    assert step.num_compiles == LOSSES[loss_fn]


def test_many_programs_for_texts_are_told(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(nn.Linear(4, 2), by_prefix)
    state = step.init()
    for number in range(4):
        state, _ = step(state, batch_of(number))
    (found,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "loss_fn reads a text of the batch" in found.message
    assert "program 4" in found.message


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    ids: list[str]


def test_texts_of_a_record_that_nobody_reads_need_no_program() -> None:
    step = step_of(nn.Linear(4, 2), lambda model, batch: model(batch.x).square().mean())
    state = step.init()
    for number in range(3):
        batch = batch_of(number)
        state, _ = step(state, Batch(batch["x"], batch["ids"]))
    assert step.num_compiles == 1


def test_a_loss_that_begins_to_read_texts_is_compiled_for_each() -> None:
    weights: dict[str, float] = {}

    def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * (weights[batch["task"]] if weights else 1.0)

    step = step_of(nn.Linear(4, 2), weighted)
    state = step.init()
    for number in range(2):
        state, _ = step(state, batch_of(number))
    assert step.num_compiles == 1
    weights |= {"a": 0.0, "b": 2.0}
    for number in range(4):
        state, metrics = step(state, batch_of(number))
        assert (float(metrics["loss"]) == 0.0) == (number % 2 == 0)


def where_asked(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * (2.0 if batch["num"] > 3 and batch["task"] == "a" else 1.0)


def where_text(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * (2.0 if type(batch["task"]) is str and batch["task"] == "a" else 1.0)


@pytest.mark.parametrize("loss_fn", [where_asked, where_text], ids=lambda fn: fn.__name__)
def test_a_loss_that_reads_texts_at_some_calls(loss_fn: Callable[..., torch.Tensor]) -> None:
    model = nn.Linear(4, 2)
    step = step_of(model, loss_fn)
    state = step.init()
    for number, task in [(1, "b"), (1, "c"), (1, "a"), (5, "c"), (5, "a"), (1, "b")]:
        batch = {"x": torch.randn(8, 4), "num": number, "task": task}
        expected = loss_fn(step.export(state), batch).item()
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)  # float32, a few sums
