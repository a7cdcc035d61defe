"""What a loss function may return: each form trains like the loss alone, and gives its numbers as metrics."""

import collections
import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

import torch_shard as ts
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH, WHOLE, make_mesh

Named = collections.namedtuple("Named", ["error", "loss", "logits"])


@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    error: torch.Tensor
    logits: torch.Tensor


FORMS: dict[str, tuple[Any, set[str]]] = {
    "(1, 1)": (lambda loss, error, out: loss.reshape(1, 1), set()),
    "(1,) and metrics": (lambda loss, error, out: (loss[None], {"error": error, "logits": out}), {"error", "logits"}),
    "dict": (
        lambda loss, error, out: {"logits": out, "error": error[None], "rows": 3, "what": "text", "loss": loss[None]},
        {"error", "rows"},
    ),
    "Hugging Face": (lambda loss, error, out: SequenceClassifierOutput(loss=loss, logits=out), set()),
    "named tuple": (lambda loss, error, out: Named(error, loss, out), {"error"}),
    "dataclass": (lambda loss, error, out: Record(loss, error, out), {"error"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_trains_like_the_loss_alone(form: str) -> None:
    make, names = FORMS[form]

    def parts(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return F.mse_loss(out, batch[1]), (out - batch[1]).abs().mean(), out

    torch.manual_seed(0)
    model, batch = nn.Linear(8, 4), (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    eager, loss_fn = copy.deepcopy(model), lambda m, b: make(*parts(m, b))
    step = sgd_step(model, loss_fn)
    state, metrics = step(step.init(), batch)
    loss, error, _ = parts(eager, batch)
    loss.backward()
    np.testing.assert_allclose(state.params["weight"], (eager.weight - 0.1 * eager.weight.grad).detach(), rtol=1e-5)
    assert set(metrics) == {"loss", "grad_norm", *names}
    assert metrics["loss"].shape == ()
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
    if "error" in names:
        assert metrics["error"].shape == ()
        np.testing.assert_allclose(metrics["error"], error.item(), rtol=1e-5)
    if form == "dict":
        assert set(step.evaluation()(state, batch)) == {"loss", *names}
        ts.compare_with_torch(model, loss_fn, batch, mesh=make_mesh((4, 2)), plan=WHOLE).raise_if_different()
