"""The training step: its state, its metrics, its evaluation, and losses that it refuses."""

import copy
import logging
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import BATCH, CASE, WHOLE, Dropping, make_mesh, make_step


def test_the_state_is_donated() -> None:
    case = CASE["mlp"]
    step = make_step(case)
    state, (batch,) = step.init(), case.batches(1)
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    with pytest.raises(ValueError, match=r"donated to an earlier call.*state, metrics = step\(state, batch\)"):
        step(state, batch)


def test_flags_are_read_at_each_call() -> None:
    torch.manual_seed(0)
    model = Dropping()
    step = step_of(model, optimizer=optax.sgd(0.0))
    x = torch.randn(BATCH, 16)
    wanted = model.layer(x).square().mean().item()
    state, training = step(step.init(), x)
    model.drop.eval()
    state, evaluating = step(state, x)
    model.drop.train()
    state, again = step(state, x)
    assert step.num_compiles == 2
    np.testing.assert_allclose(evaluating["loss"], wanted, rtol=1e-5)
    assert abs(float(training["loss"]) - wanted) > 1e-3
    assert abs(float(again["loss"]) - wanted) > 1e-3
    model.layer.bias.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"requires_grad of layer\.bias has changed since the step was made.*Make a new"
    ):
        step(state, x)
    model.layer.bias.requires_grad_(True)
    step(state, x)


def test_hooks_that_come_and_go_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    step = step_of(model, optimizer=optax.sgd(0.0))
    state, x = step.init(), torch.ones(8, 4)
    state, before = step(state, x)
    for register, cause in (
        (
            lambda: model.weight.register_hook(lambda grad: grad * 2),
            r"hooks of parameters .* were added or removed",
        ),
        (lambda: register_module_forward_hook(lambda module, args, out: out * 2), "hooks on all modules"),
    ):
        hook = register()
        with caplog.at_level(logging.INFO):
            state, after = step(state, x)
        assert re.search(f"compiles again: .*{cause}", caplog.text)
        other = step_of(model, optimizer=optax.sgd(0.0))  # which finds no capture without it
        assert float(after["grad_norm"]) == float(other(other.init(), x)[1]["grad_norm"])
        assert float(after["grad_norm"]) != float(before["grad_norm"])
        hook.remove()
        state, again = step(state, x)
        assert float(again["grad_norm"]) == float(before["grad_norm"])
    assert step.num_compiles == 3
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(NotImplementedError, match="make_train_step: weight has a post-accumulate-grad hook"):
        step(state, x)


def test_the_eval_step_is_in_eval_mode_and_leaves_model_and_state_alone() -> None:
    case = CASE["mlp"]
    model, (batch,) = (
        nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
        case.batches(1),
    )
    step = step_of(model, case.loss_fn, optax.adam(1e-2))
    evaluate = ts.make_eval_step(model, case.loss_fn, mesh=make_mesh((4, 2)), plan=WHOLE)
    state, _ = step(step.init(), batch)
    before = ts.gather(state.buffers)
    metrics = evaluate(state, batch)
    assert model.training
    assert all(m.training for m in model.modules())
    exported = step.export(state).eval()
    with torch.no_grad():
        np.testing.assert_allclose(metrics["loss"], case.loss_fn(exported, batch).item(), rtol=1e-4)
    assert all(torch.equal(before[n], t) for n, t in ts.gather(state.buffers).items())


def test_metrics_of_the_loss_come_back() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = model(batch["x"])
        loss = F.mse_loss(out, batch["y"])
        return loss, {"error": {"mean": (out - batch["y"]).abs().mean()}, "rows": batch["x"].shape[0]}

    x, y = CASE["mlp"].batches(1)[0]
    model = CASE["mlp"].model()
    step = step_of(copy.deepcopy(model), loss_fn, plan=CASE["mlp"].plan)
    _, metrics = step(step.init(), {"x": x, "y": y.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(metrics["error"]["mean"], (model(x) - y).abs().mean(), rtol=1e-5)
    F.mse_loss(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-5)
    assert int(metrics["rows"]) == BATCH
    assert set(metrics) == {"loss", "grad_norm", "error", "rows"}


@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (lambda m, x: m(x), TypeError, r"must return a scalar.*it returned \(8, 4\) torch.float32.*\.mean\(\)"),
        (lambda m, x: m(x).mean().item(), NotImplementedError, r"item\(\)"),
        (lambda m, x: (m(x).mean(), [1]), TypeError, r"\(\) torch.float32, and list where metrics are"),
        (
            lambda m, x: (m(x).mean(), m(x)),
            TypeError,
            r"and \(8, 4\) torch.float32 where metrics are. Give metrics names: return loss, ",
        ),
        (
            lambda m, x: {"logits": m(x)},
            TypeError,
            "returned dict of logits, where it has no loss. Models of transformers have a loss where",
        ),
        (lambda m, x: {"loss": m(x)}, TypeError, r"returned dict of loss, where loss is \(8, 4\) torch.float32"),
        (lambda m, x: {"loss": None}, TypeError, "returned dict of loss, where loss is NoneType"),
        (lambda m, x: {"loss": m(x).mean(), "guard": 1}, ValueError, "the step itself reports guard"),
        (lambda m, x: (loss := m(x).mean(), loss.backward())[0], RuntimeError, r"has called backward\(\) on the loss"),
        (
            lambda m, x: m(x).mean() + torch.special.airy_ai(x).mean(),
            NotImplementedError,
            r"aten.special_airy_ai.*test_train",
        ),
    ],
)
def test_losses_that_cannot_be_trained(loss_fn: Any, error: type[Exception], match: str) -> None:
    step = step_of(nn.Linear(8, 4), loss_fn)
    with pytest.raises(error, match=f"(?s){match}"):
        step(step.init(), torch.ones(8, 8))
