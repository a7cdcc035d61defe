"""Tensors beside a model's own that lie in the memory of what training changes: refused by the entry."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.steps import mean_square, sgd_step
from tests.tables.cases import WHOLE, make_mesh

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class TiedView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = self.first.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.head


class Statistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.mean = self.norm.running_mean[None]  # pyright: ignore[reportOptionalSubscript]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) - self.mean


def reading(value: Any) -> Any:
    return lambda m, x: mean_square(m, x) + value.square().sum()


def computing(value: Any) -> Any:
    return lambda m, x: mean_square(m, x) + float((value**2).sum())


def asking(value: torch.Tensor) -> Any:
    return lambda m, x: mean_square(m, x) * (2 if float(value.sum()) > 0 else 3)


def names(model: nn.Module) -> Any:
    first = dict(model.state_dict())
    return lambda m, x: mean_square(m, x) + sum((p - first[name]).square().sum() for name, p in m.named_parameters())


def teacher(model: nn.Module) -> Any:
    other = nn.Linear(4, 4).requires_grad_(False)
    other.weight.data = model.weight.data  # pyright: ignore[reportAttributeAccessIssue]
    return lambda m, x: (m(x) - other(x)).square().mean()


def linear(make: Callable[[Any], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def both() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 4)
        return model, make(model)

    return both


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "detached": (linear(lambda m: reading(m.weight.detach())), r"  value, \(4, 4\), in that of weight, \(4, 4\)\n"),
    "a part": (linear(lambda m: reading(m.weight.data[1:3])), r"  value, \(2, 4\), in that of weight, \(4, 4\)\n"),
    "numpy": (linear(lambda m: computing(m.weight.detach().numpy()[::-1])), r"  value, \(4, 4\), in that of weight"),
    "asked": (linear(lambda m: asking(m.weight.detach())), r"  value, \(4, 4\), in that of weight"),
    "state_dict": (linear(names), r"  first, \(4, 4\), in that of weight, .*\n  first, \(4,\), in that of bias"),
    "teacher": (linear(teacher), r"\(4, 4\), in that of weight, \(4, 4\)\n"),
    "attribute": (lambda: (TiedView(), mean_square), r"  head, \(4, 4\), in that of first\.weight"),
    "buffer": (lambda: (Statistic(), mean_square), r"  mean, \(1, 4\), in that of norm\.running_mean"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_lies_in_the_memory_of_what_a_step_changes_is_refused(name: str) -> None:
    make, words = CASES[name]
    model, loss_fn = make()
    step = sgd_step(model, loss_fn)
    found = rf"(?s)^make_train_step: the loss reads what lies in the memory.*{words}.*model\.weight\.detach\(\)"
    with pytest.raises(NotImplementedError, match=found):
        step(step.init(), X)


def test_an_evaluation_has_the_parameters_of_a_state_too() -> None:
    apply = ts.make_apply(TiedView(), mesh=make_mesh((1, 1)), plan=WHOLE)
    with pytest.raises(NotImplementedError, match=r"^make_apply: the forward pass reads what lies in the memory"):
        apply(X)


def test_what_nothing_changes_or_is_of_its_own_memory_is_right() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False)).eval()
    own = (model[0].weight.detach().clone(), model[1].running_mean.view(1, 4), model[2].weight.data)

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return mean_square(m, x) + sum(((m[0].weight * value) ** 2).sum() for value in own)

    wanted = loss_fn(model, X).item()
    step = sgd_step(model, loss_fn)
    _, metrics = step(step.init(), X)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)  # float32 sums
