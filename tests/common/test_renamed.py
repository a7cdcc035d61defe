"""Arguments under a name that they no longer have."""

from typing import Any

import pytest
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of


def test_an_old_name_is_refused_with_the_new_one() -> None:
    model = nn.Linear(2, 2)
    step: Any = step_of(model)
    fit: Any = ts.fit
    for call, renamed in (
        (lambda: step_of(model, cast="products"), "make_train_step: cast= is called mixed_precision="),
        (
            lambda: step_of(model, max_grad_norm=1.0),
            "make_train_step: max_grad_norm= is called clip_grad_norm=",
        ),
        (lambda: step(None, None, max_grad_norm=1.0), "TrainStep.__call__: max_grad_norm= is called skip_grad_norm="),
        (lambda: fit(step, None, [], max_grad_norm=1.0), "fit: max_grad_norm= is called skip_grad_norm="),
    ):
        with pytest.raises(TypeError, match=renamed):
            call()
