"""What takes long says so, where logging is set up and where it is not, and what is over in time says nothing."""

import logging
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.oracles.steps import step_of
from torch_shard._common import progress

PACKAGE, LOGGER = logging.getLogger("torch_shard"), logging.getLogger("torch_shard._anywhere")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    PACKAGE.setLevel(logging.NOTSET)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SLOW_S", 0.01)


def work(seconds: float) -> None:
    with progress.telling_when_slow(LOGGER, "fit: %s since %d s", "at work", 10):
        time.sleep(seconds)


@pytest.mark.usefixtures("soon")
def test_without_logging_set_up_a_line_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().setLevel(logging.WARNING)  # as it is in any process
    work(0.3)
    assert capsys.readouterr().err == "fit: at work since 10 s\n"


def test_what_is_over_in_time_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(0.0)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_a_level_of_the_package_is_heeded(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    PACKAGE.setLevel(logging.WARNING)
    work(0.3)
    assert capsys.readouterr().err == ""
    assert not caplog.records
    PACKAGE.setLevel(logging.INFO)
    work(0.3)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "fit: at work since 10 s")
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_a_step_in_a_loop_of_its_own_says_that_it_is_traced_and_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    step = step_of(model, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    state, batch = step.init(seed=0), torch.ones(8, 8)
    state, _ = step(state, batch)
    traced, compiled = capsys.readouterr().err.splitlines()
    assert traced.startswith("make_train_step: the loss is traced, once for these shapes;")
    assert compiled.startswith("make_train_step: XLA compiles the program for a batch of (8, 8), once")
    step(state, batch)
    assert capsys.readouterr().err == ""
