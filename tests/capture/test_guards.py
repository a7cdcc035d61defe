"""Python values outside of the model that a loss reads: a change between steps is seen, one by the loss is refused."""

import dataclasses
import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.cases import BATCH, CASE, WHOLE, Dropping, make_mesh, make_step, squared_error

FACTOR = 1.0


@dataclasses.dataclass
class Settings:
    factor: float = 1.0
    parts: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Trainer:
    def __init__(self) -> None:
        self.factor, self.steps = 1.0, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * self.factor

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.loss(model, batch)


class Configured(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.settings.factor * sum(self.settings.parts)


def by_global(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * FACTOR


def plain(model: nn.Module, batch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return model(batch).square().mean() * factor


def beta() -> float:
    return annealed()


def annealed() -> float:
    return FACTOR * schedule.current() + schedule.offset


class Schedule:
    def __init__(self) -> None:
        self.value, self.offset = 1.0, 0.0

    def current(self) -> float:
        return self.halved * 2

    @property
    def halved(self) -> float:
        return self.value / 2


schedule = Schedule()


def by_functions(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * beta()


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor()

    def factor(self) -> float:
        return beta()


def closures() -> dict[str, Callable[[], tuple[nn.Module, Any, Callable[[], None]]]]:
    def cell() -> Any:
        factor = [1.0]

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean() * factor[0]

        return nn.Linear(8, 8), loss, lambda: factor.__setitem__(0, 3.0)

    def reassigned_tensor() -> Any:
        box = types.SimpleNamespace(factor=torch.tensor(1.0))
        loss = lambda model, batch: model(batch).square().mean() * box.factor  # noqa: E731
        return nn.Linear(8, 8), loss, lambda: setattr(box, "factor", torch.tensor(3.0))

    def module_global() -> Any:
        return nn.Linear(8, 8), by_global, lambda: globals().__setitem__("FACTOR", 3.0)

    def bound_method() -> Any:
        trainer = Trainer()
        return nn.Linear(8, 8), trainer.loss, lambda: setattr(trainer, "factor", 3.0)

    def partial() -> Any:
        settings = {"factor": 1.0}
        loss = functools.partial(plain, **settings)
        return nn.Linear(8, 8), loss, lambda: loss.keywords.__setitem__("factor", 3.0)

    def settings_of_the_model() -> Any:
        model = Configured()
        return model, plain, lambda: setattr(model.settings, "factor", 3.0)

    def list_in_the_settings() -> Any:
        model = Configured()
        return model, plain, lambda: model.settings.parts.append(2.0)

    def through_functions() -> Any:
        return nn.Linear(8, 8), by_functions, lambda: globals().__setitem__("FACTOR", 3.0)

    def through_methods() -> Any:
        schedule.value = 1.0
        return nn.Linear(8, 8), by_functions, lambda: setattr(schedule, "value", 3.0)

    def through_forward() -> Any:
        schedule.offset = 0.0
        return Scaled(8, 8), plain, lambda: setattr(schedule, "offset", 3.0)

    def called_object() -> Any:
        trainer = Trainer()
        return nn.Linear(8, 8), trainer, lambda: setattr(trainer, "factor", 3.0)

    made = (cell, reassigned_tensor, module_global, bound_method, partial, settings_of_the_model, list_in_the_settings)
    made += (through_functions, through_methods, through_forward, called_object)
    return {make.__name__: make for make in made}


PLAN = ts.ShardingPlan({}, default=P())


@pytest.mark.parametrize("name", closures())
def test_a_change_between_steps_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    model, loss_fn, change = closures()[name]()
    batch = torch.randn(8, 8)
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.0), mesh=make_mesh((1, 1)), plan=PLAN)
    state = step.init()
    for num_compiles in (1, 1, 2, 2):
        if num_compiles == 2 and step.num_compiles == 1:
            change()
        wanted = loss_fn(model, batch).item()
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)
        assert step.num_compiles == num_compiles


def test_counters_of_the_trainer_do_not_compile_again() -> None:
    trainer, batch = Trainer(), torch.randn(8, 8)
    step = ts.make_train_step(nn.Linear(8, 8), trainer.loss, optax.sgd(0.1), mesh=make_mesh((1, 1)), plan=PLAN)
    state = step.init()
    for _ in range(3):
        trainer.steps += 1
        state, _ = step(state, batch)
    assert step.num_compiles == 1


@pytest.mark.parametrize("depends", [True, False])
def test_what_the_loss_itself_changes(depends: bool) -> None:
    count = [0]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return model(batch).square().mean() * (count[0] if depends else 1)

    step = ts.make_train_step(nn.Linear(8, 8), loss, optax.sgd(0.1), mesh=make_mesh((1, 1)), plan=PLAN)
    if depends:
        with pytest.raises(NotImplementedError, match="changes count on each call and depends on it"):
            step(step.init(), torch.ones(8, 8))
        return
    state = step.init()
    for _ in range(2):
        state, _ = step(state, torch.ones(8, 8))
    assert step.num_compiles == 1


def test_plain_attributes_are_read_at_each_step() -> None:
    case = CASE["buffers"]
    model, (batch,) = case.model(), case.batches(1)
    step = make_step(case, optimizer=optax.sgd(0.0), model=model)
    state, first = step(step.init(), batch)
    model.shift.add_(1)
    _, second = step(state, batch)
    assert abs(float(first["loss"]) - float(second["loss"])) > 1e-3
    assert step.num_compiles == 1


def test_a_teacher_beside_the_model_is_followed() -> None:
    """Its parameters are read at each step, and so is its mode."""
    torch.manual_seed(0)
    teacher, model = Dropping(), nn.Linear(16, 16)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    step = ts.make_train_step(model, loss_fn, optax.sgd(0.0), mesh=make_mesh((4, 2)), plan=WHOLE)
    state, x = step.init(), torch.randn(BATCH, 16)
    state, training = step(state, x)
    teacher.eval()
    state, evaluating = step(state, x)
    np.testing.assert_allclose(evaluating["loss"], loss_fn(model, x).item(), rtol=1e-5)
    assert float(training["loss"]) != float(evaluating["loss"])
    with torch.no_grad():
        teacher.layer.weight.zero_()
    state, moved = step(state, x)
    np.testing.assert_allclose(moved["loss"], loss_fn(model, x).item(), rtol=1e-5)


def test_numbers_of_the_model_may_change(caplog: pytest.LogCaptureFixture) -> None:
    class Annealed(nn.Linear):
        beta = 1.0

        def __init__(self) -> None:
            super().__init__(8, 4)
            self.beta, self.shift = 1.0, torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.beta * super().forward(x) + self.shift

    torch.manual_seed(0)
    model, batch = Annealed(), (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    step = ts.make_train_step(model, squared_error, optax.sgd(0.0), mesh=make_mesh((8, 1)), plan=WHOLE)
    state, _ = step(step.init(), batch)
    with caplog.at_level(logging.INFO, logger="torch_shard"):
        for beta, shift in [(0.5, torch.zeros(4)), (0.5, torch.ones(4))]:
            model.beta, model.shift = beta, shift
            state, metrics = step(state, batch)
            np.testing.assert_allclose(metrics["loss"], squared_error(model, batch).item(), rtol=1e-5)
    assert "the attribute beta has another value" in caplog.text
    assert "the attribute shift has another value" in caplog.text


def test_an_explanation_lists_what_a_program_keeps() -> None:
    found = ts.explain_capture(nn.Linear(8, 8), by_functions, torch.ones(8, 8))
    assert {f"FACTOR = {FACTOR}", f"schedule.offset = {schedule.offset}", f"Schedule.value = {schedule.value}"} <= set(
        found.frozen
    )
