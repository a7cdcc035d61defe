"""A scheduler of torch in `fit`."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LambdaLR

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of
from torch_shard._fit.schedule import Schedule

DATA = [torch.full((2, 3), float(i)) for i in range(6)]


def make() -> tuple[nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda step: 0.5 if step % 3 == 1 else math.cos(step / 9))  # Python, with its `if`
    step = step_of(model, optimizer=optimizer, mesh=(2, 1), clip_grad_norm=1.0)
    return model, optimizer, schedule, step


def in_torch(num_steps: int) -> nn.Module:
    model, optimizer, schedule, _ = make()
    for x in DATA[:num_steps]:
        optimizer.zero_grad()
        mean_square(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def test_a_run_that_is_resumed_follows_the_schedule(tmp_path: Path) -> None:
    _, _, schedule, step = make()
    with ts.Checkpointer(tmp_path) as checkpointer:
        ts.fit(step, None, DATA, steps=4, scheduler=schedule, checkpointer=checkpointer, progress=False)
    _, _, again, step = make()
    with ts.Checkpointer(tmp_path) as checkpointer:
        state = ts.fit(step, None, DATA, steps=6, scheduler=again, checkpointer=checkpointer, progress=False)
    assert (schedule.last_epoch, again.last_epoch) == (4, 6)
    for mine, wanted in zip(step.export(state).parameters(), in_torch(6).parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach())
    assert float(step.export_optimizer(state)["state"][0]["momentum_buffer"].abs().sum()) > 0


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "by milestones": lambda o: lrs.MultiStepLR(o, [2, 4, 5], 0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 9),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=20),
    "cycles": lambda o: lrs.CyclicLR(o, 0.1, 0.4, step_size_up=3),
    "one after another": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1, 4), lrs.ExponentialLR(o, 0.5)], [4]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, 1, 4), lrs.ExponentialLR(o, 0.8)]),
    "function": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("ahead", [0, 3])
def test_rates_go_on_from_where_the_scheduler_stands_and_through_a_checkpoint(name: str, ahead: int) -> None:
    def objects() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9, weight_decay=0.1)
        return optimizer, SCHEDULERS[name](optimizer)

    def numbers(optimizer: Any) -> tuple[float, ...]:
        return tuple(optimizer.param_groups[0][key] for key in ("lr", "momentum", "weight_decay"))

    optimizer, scheduler = objects()
    wanted: list[tuple[float, ...]] = []
    for position in range(-ahead, 6):
        optimizer.step()
        scheduler.step()
        if position == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        wanted.append(numbers(optimizer))

    optimizer, scheduler = objects()
    for _ in range(ahead):
        optimizer.step()
        scheduler.step()
    schedule, found = Schedule(scheduler, "step"), wanted[:ahead]
    schedule.begin(0, {}, optimizer)
    for position in range(6):
        if position == 4:
            notes = json.loads(json.dumps(schedule.state_dict(optimizer)))
            optimizer, scheduler = objects()
            schedule = Schedule(scheduler, "step")
            (parameter,) = optimizer.param_groups[0]["params"]
            schedule.begin(4, notes, optimizer)
            assert optimizer.param_groups[0]["params"][0] is parameter  # of one element, and not a number of the group
        schedule.follow(position + 1)
        if position == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        found.append(numbers(optimizer))
    assert found == wanted


def test_a_schedule_stands_still_at_a_batch_that_is_not_taken(tmp_path: Path) -> None:
    bad = [DATA[1], torch.full((2, 3), torch.nan), DATA[2], DATA[3]]
    _, optimizer, schedule, step = make()
    with ts.Checkpointer(tmp_path) as checkpointer:
        about = {"scheduler": schedule, "checkpointer": checkpointer, "progress": False, "on_bad_step": "stop"}
        state = ts.fit(step, None, bad, steps=4, **about)
        assert (int(state.num_batches), schedule.last_epoch) == (1, 1)
        ts.fit(step, state, [DATA[1], DATA[2], DATA[3], DATA[4]], steps=4, **about)
    assert schedule.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == make_rate(4)


def test_an_evaluation_that_fails_is_made_when_the_run_is_taken_up_again(tmp_path: Path) -> None:
    class Fails(ts.Callback):
        def on_step(self, run: Any) -> None:
            if run.position == 4:
                raise OSError("no space")

    def run(callbacks: Any = (), **options: Any) -> float:
        _, optimizer, _, step = make()
        schedule = lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.99)
        options |= {"eval_loader": DATA, "eval_every": 2, "progress": False, "callbacks": callbacks}
        ts.fit(step, None, DATA, steps=6, scheduler=schedule, **options)
        return optimizer.param_groups[0]["lr"]

    wanted = run()
    with ts.Checkpointer(tmp_path) as checkpointer, pytest.raises(OSError, match="no space"):
        run([Fails()], checkpointer=checkpointer)
    with ts.Checkpointer(tmp_path) as checkpointer:
        assert run(checkpointer=checkpointer) == wanted < 0.1


def make_rate(number: int) -> float:
    """The rate after so many steps of the scheduler."""
    _, optimizer, schedule, _ = make()
    for _ in range(number):
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[0]["lr"]


def test_numbers_of_a_script_give_way_to_those_of_a_checkpoint_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates: list[float] = []
    for steps, rate in ((2, 0.1), (3, 0.5)):
        _, optimizer, _, step = make()
        optimizer.param_groups[0]["lr"] = rate
        with ts.Checkpointer(tmp_path) as checkpointer:
            ts.fit(step, None, DATA, steps=steps, checkpointer=checkpointer, progress=False)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.1]
    assert "group 0 of the optimizer takes the numbers of the checkpoint" in caplog.text
    assert "lr 0.5 -> 0.1" in caplog.text


def test_rates_of_numpy_come_back_and_other_groups_are_refused(tmp_path: Path) -> None:
    wanted: list[float] = []
    for steps in (6, 3, 6):
        _, optimizer, _, step = make()
        schedule = lrs.MultiplicativeLR(optimizer, lambda _: np.float32(0.8))
        with ts.Checkpointer(tmp_path / str(bool(wanted))) as checkpointer:
            ts.fit(step, None, DATA, steps=steps, scheduler=schedule, checkpointer=checkpointer, progress=False)
        wanted += [float(optimizer.param_groups[0]["lr"])]
    assert wanted[0] == pytest.approx(wanted[2])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
    step = step_of(model, optimizer=optimizer, mesh=(2, 1))
    with (
        ts.Checkpointer(tmp_path / "True") as checkpointer,
        pytest.raises(ValueError, match="saved with 1 parameter groups, and the optimizer has 2"),
    ):
        ts.fit(step, None, DATA, steps=7, checkpointer=checkpointer, progress=False)


def test_a_loop_of_ones_own_goes_on_as_its_guide_says(tmp_path: Path) -> None:
    for steps in (2, 4):
        _, optimizer, schedule, step = make()
        with ts.Checkpointer(tmp_path) as checkpointer:
            state = step.init(seed=0)
            if checkpointer.steps():
                state = checkpointer.restore(step)
                notes = checkpointer.notes(int(state.step))
                schedule.load_state_dict(notes["scheduler"])
                optimizer.param_groups[0]["lr"] = notes["rates"][0]
            for x in DATA[int(state.step) : steps]:
                state, _ = step(state, x)
                schedule.step()
            checkpointer.save(state, notes={"scheduler": schedule.state_dict(), "rates": schedule.get_last_lr()})
    for mine, wanted in zip(step.export(state).parameters(), in_torch(4).parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach())


def test_other_schedulers_are_refused() -> None:
    _, _, _, step = make()
    _, _, other, _ = make()
    with pytest.raises(ValueError, match="another optimizer than the one that the step was made with"):
        ts.fit(step, None, DATA, steps=1, scheduler=other, progress=False)

    class Unknown(lrs.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    with pytest.raises(TypeError, match=r"a Unknown has no last_epoch.*on_step"):
        ts.fit(step, None, DATA, steps=1, scheduler=Unknown(step.optimizer), progress=False)
    with pytest.raises(TypeError, match="scheduler must be"):
        ts.fit(step, None, DATA, steps=1, scheduler=3, progress=False)  # pyright: ignore
