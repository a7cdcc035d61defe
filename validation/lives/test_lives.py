"""Random lives of runs beside eager torch, and faults that they are to find: `pytest validation/lives` (5 minutes)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_shard._fit import schedule
from torch_shard._fit.schedule import Schedule
from torch_shard._optim.from_torch import TorchOptimizer
from torch_shard._state.live import LiveModel
from torch_shard._train.live_optimizer import LiveOptimizer
from validation.lives.life import draw, judge


@pytest.mark.parametrize("seed", range(40))
def test_a_life_is_right_or_refused(seed: int) -> None:
    verdict = judge(seed)
    assert verdict.is_fine, verdict


def test_a_seed_is_one_life() -> None:
    assert draw(7) == draw(7)
    assert len({str(draw(seed)) for seed in range(50)}) == 50


def no_counts_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """A parameter that had no gradient so far goes on at the count of its group."""
    load = TorchOptimizer.load

    def of_group(self: Any, values: Any) -> Any:
        if (state := load(self, values)) is None:
            return None
        taken, groups = np.asarray(state.taken), np.array(list(self._group_of.values()))
        return dataclasses.replace(state, taken=np.array([taken[groups == each].max() for each in groups], np.int32))

    patch.setattr(TorchOptimizer, "load", of_group)


def moments_that_are_loaded_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveOptimizer, "is_changed", lambda self: False)


def writes_to_the_model_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveModel, "write", lambda self, name, value: None)


def the_model_stays_as_it_was(patch: pytest.MonkeyPatch) -> None:
    follow = LiveModel.follow

    def at_first(self: Any, state: Any, plan: Any, *, is_step: bool = False) -> None:
        if not is_step:
            follow(self, jax.tree.map(jnp.copy, state), plan)

    patch.setattr(LiveModel, "follow", at_first)


def a_schedule_that_is_ahead_stands_still(patch: pytest.MonkeyPatch) -> None:
    begin = Schedule.begin

    def begin_at_0(self: Schedule, *given: Any) -> None:
        begin(self, *given)
        self.ahead = 0

    patch.setattr(Schedule, "begin", begin_at_0)


def numbers_of_groups_do_not_come_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule, "_take_numbers", lambda *given, warns: None)


def schedules_do_not_come_back(patch: pytest.MonkeyPatch) -> None:
    state_dict = Schedule.state_dict
    patch.setattr(Schedule, "state_dict", lambda self, optimizer: {**state_dict(self, optimizer), "scheduler": {}})


@pytest.mark.parametrize(
    "break_",
    [
        no_counts_of_their_own,
        moments_that_are_loaded_are_dropped,
        writes_to_the_model_are_lost,
        the_model_stays_as_it_was,
        a_schedule_that_is_ahead_stands_still,
        numbers_of_groups_do_not_come_back,
        schedules_do_not_come_back,
    ],
)
def test_a_fault_is_found_within_100_lives(
    break_: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_(monkeypatch)
    assert any(not judge(seed).is_fine for seed in range(100))
