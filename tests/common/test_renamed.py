"""Arguments under a name that they no longer have."""

from typing import Any

import optax
import pytest
from torch import nn

import torch_shard as ts


def test_an_old_name_is_refused_with_the_new_one() -> None:
    mesh = ts.make_mesh(batch=1)
    given: dict[str, Any] = {"mesh": mesh, "plan": ts.plans.replicated()}
    make: Any = ts.make_train_step
    with pytest.raises(TypeError, match="make_train_step: cast= is called mixed_precision="):
        make(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), optax.sgd(0.1), cast="products", **given)
    with pytest.raises(TypeError, match="make_train_step: max_grad_norm= is called clip_grad_norm="):
        make(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), optax.sgd(0.1), max_grad_norm=1.0, **given)
    step: Any = make(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), optax.sgd(0.1), **given)
    with pytest.raises(TypeError, match=r"TrainStep\.__call__: max_grad_norm= is called skip_grad_norm="):
        step(step.init(), None, max_grad_norm=1.0)
    fit: Any = ts.fit
    with pytest.raises(TypeError, match="fit: max_grad_norm= is called skip_grad_norm="):
        fit(step, step.init(), [], max_grad_norm=1.0)
