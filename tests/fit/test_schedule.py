"""A scheduler of torch in `fit`."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of

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


def test_other_schedulers_are_refused() -> None:
    _, _, _, step = make()
    _, _, other, _ = make()
    with pytest.raises(ValueError, match="another optimizer than the one that the step was made with"):
        ts.fit(step, None, DATA, steps=1, scheduler=other, progress=False)
    with pytest.raises(TypeError, match="scheduler must be"):
        ts.fit(step, None, DATA, steps=1, scheduler=3, progress=False)  # pyright: ignore
