"""Captures that start again: the user's code sees nothing of it, and the numbers are those of eager torch."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import Case
from tests.tables.layered import LAYERED, Layered


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


@pytest.mark.parametrize(
    "layered", [row for row in LAYERED if row.case.name in STARTING_AGAIN], ids=lambda layered: layered.case.name
)
def test_nothing_is_thrown_through_the_users_code(layered: Layered) -> None:
    SEEN.clear()
    case = _watched(layered.case)
    step = assert_follows(case, case.model(), eager_trajectory(case, 2), (4, 2))
    assert SEEN == []
    assert layered.says in step.report()
