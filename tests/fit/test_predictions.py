"""Metrics of all predictions of an evaluation: those of eager torch, on a mesh that cuts them unevenly."""

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_shard as ts

ROWS = 53  # 16 + 16 + 16 + 5, and 5 rows do not divide over four devices
generator = torch.Generator().manual_seed(0)
X = torch.randn(64, 6, generator=generator)
Y = (X.sum(1) > 0).long()
DATA, HELD_OUT = TensorDataset(X, Y), TensorDataset(X[:ROWS], Y[:ROWS])


def f1(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the whole set: not the mean of that of batches."""
    found = logits.argmax(1)
    return 2 * (found * labels).sum() / (found + labels).sum()


class F1:
    """An object as torchmetrics has them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.seen.append((logits, labels))

    def compute(self) -> torch.Tensor:
        return f1(*(torch.cat(parts) for parts in zip(*self.seen, strict=True)))


@pytest.fixture(scope="module")
def step() -> ts.TrainStep:
    return make_step()


def make_step(**options: Any) -> ts.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
    mesh, adam = ts.make_mesh(batch=4, model=2), torch.optim.Adam(model.parameters(), 1e-2)
    plan = ts.plans.fsdp_tp(model, mesh)
    return ts.make_train_step(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), adam, mesh=mesh, plan=plan, **options)


def run(step: ts.TrainStep, **options: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The last evaluation, and what eager torch makes of the whole set then."""
    heard: list[dict[str, float]] = []

    class Hear(ts.Callback):
        def on_eval(self, run: ts.Run, metrics: Any) -> None:
            heard.append(dict(metrics))

    options = {"eval_loader": DataLoader(HELD_OUT, batch_size=16), "predict": lambda m, b: (m(b[0]), b[1])} | options
    options |= {"callbacks": [Hear(), *options.get("callbacks", [])]}
    state = ts.fit(step, None, DATA, batch_size=16, steps=4, eval_every=2, progress=False, **options)
    logits = step.export(state).eval()(X[:ROWS])
    return heard[-1], {"loss": F.cross_entropy(logits, Y[:ROWS]).item(), "f1": f1(logits, Y[:ROWS]).item()}


def test_a_function_gets_all_predictions_in_order(step: ts.TrainStep) -> None:
    got: list[Any] = []

    def compute(found: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        got.append(found)
        return {"f1": f1(*found)}

    found, eager = run(step, compute_metrics=compute, callbacks=[ts.EarlyStopping("f1", mode="max", patience=9)])
    assert found == pytest.approx(eager, rel=1e-5)  # of float32
    assert [len(labels) for _, labels in got] == [ROWS, ROWS]
    assert torch.equal(got[-1][1], Y[:ROWS])


def test_a_list_for_evaluation_is_of_rows_or_of_batches(step: ts.TrainStep) -> None:
    options = {"compute_metrics": lambda found: {"f1": f1(*found)}}
    batches = [HELD_OUT[:16], HELD_OUT[16:32], HELD_OUT[32:48], HELD_OUT[48:]]
    found, wanted = (run(make_step(), eval_loader=loader, **options)[0] for loader in (batches, HELD_OUT))
    assert found == wanted
    with pytest.raises(ValueError, match=r"items of \[0\] dims, where a row has \[1, 0\]"):
        run(step, eval_loader=[1, 2], **options)


def test_an_object_of_torchmetrics_is_updated_by_each_batch(step: ts.TrainStep, monkeypatch: Any) -> None:
    module = types.ModuleType("torchmetrics")
    module.Metric = F1  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torchmetrics", module)
    metric = F1()
    found, eager = run(step, compute_metrics=metric, eval_loader=[HELD_OUT[n] for n in range(ROWS)])  # a list of rows
    assert found == pytest.approx({"loss": eager["loss"], "F1": eager["f1"]}, rel=1e-5)
    assert [len(labels) for _, labels in metric.seen] == [16, 16, 16, 5]


def test_metrics_in_numpy_get_float32_of_a_step_in_bfloat16() -> None:
    """As `transformers.Trainer` hands it over; NumPy has no bfloat16."""
    got: list[torch.Tensor] = []

    def accuracy(found: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
        got.append(found[0])
        logits, labels = (tensor.numpy() for tensor in found)
        return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}

    step = make_step(compute_dtype=torch.bfloat16)
    evaluation, _ = run(step, compute_metrics=accuracy)
    logits = got[-1]
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())  # the values of bfloat16
    assert evaluation["accuracy"] == pytest.approx((logits.argmax(1) == Y[:ROWS]).double().mean().item())


def test_an_error_of_a_metric_says_what_it_was_given(step: ts.TrainStep) -> None:
    def accuracy(found: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:  # written for arrays of NumPy
        return {"accuracy": found[0].astype("float32").mean()}  # pyright: ignore

    with pytest.raises(AttributeError, match="astype") as caught:
        run(step, compute_metrics=accuracy)
    assert "compute_metrics was given" in caught.value.__notes__[0]
    assert "(53, 2) torch.float32, (53,) torch.int32. One that is written in NumPy" in caught.value.__notes__[0]


class NoStep(ts.Callback):
    def on_step(self, run: ts.Run) -> None:
        pytest.fail("a step was taken")


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        (lambda batch: batch, r"fit: predict is called with \(model, batch\), but"),
        (lambda m, b: m(b), "must be Tensor, not"),
        (lambda m, b: m(b[0]).numpy(), "needs the value of a tensor"),
        (lambda m, b: None, "fit: outputs must be tensors or numbers in containers, but NoneType is among them"),
    ],
)
def test_mistakes_of_predict_come_before_any_training(step: ts.TrainStep, predict: Any, said: str) -> None:
    with pytest.raises((TypeError, NotImplementedError), match=said):
        run(step, predict=predict, compute_metrics=len, callbacks=[NoStep()])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"predict": None, "compute_metrics": len}, "go together"),
        ({}, "go together"),
        ({"compute_metrics": lambda found: 3.0}, "must return a dict of numbers, got float"),
        ({"compute_metrics": lambda found: {"f1": found[0]}}, r"for 'f1', got Tensor of shape \(53, 2\)"),
        ({"compute_metrics": lambda found: {"loss": 1.0}}, "both give loss"),
        (
            {"predict": lambda m, b: m(b[0]).T, "compute_metrics": lambda found: {}},
            r"\(2, 16\) for the first batch of the evaluation and \(2, 5\) for batch 3",
        ),
        ({"compute_metrics": len, "eval_loader": None}, "which needs eval_loader"),
    ],
)
def test_what_cannot_be_computed_is_refused(step: ts.TrainStep, options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        run(step, **options)
