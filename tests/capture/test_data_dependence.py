"""Where Python asks a tensor for its value to decide about something, which is refused."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.semantics import WIDTH, built

X = torch.tensor([0.5, -1.0, 2.0])


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (Chooses(), r"in forward: if x\.sum\(\) > 0:"),
        (lambda x: x * x.sum().item(), r"item\(\)"),
        (lambda x: x.tolist()[0] + x, r"tolist\(\)"),
        (lambda x: x + float(x[0]), r"float\("),
        (lambda x: x[x > 0], r"x\[x > 0\]"),
        (lambda x: torch.nonzero(x), r"nonzero"),
        (lambda x: x.numpy().sum() + x, r"numpy"),
    ],
)
def test_values_that_python_needs_are_refused_with_file_and_line(fn: Any, what: str) -> None:
    with pytest.raises(NotImplementedError, match=rf'File "{re.escape(__file__)}", line \d+, .*{what}') as caught:
        ts.jax_jit(fn)(X)
    assert "torch.where" in str(caught.value)
    assert "torch.cond" in str(caught.value)


def test_where_chooses_by_value() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum() > 0, x.sin(), x.cos())

    for x in (X, -X):
        torch.testing.assert_close(ts.jax_jit(fn)(x).cpu(), fn(x))


class Clamps(nn.Module):
    """Keeps what overflows in bounds, as models that also run in half precision do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if not torch.isfinite(h).all():
            h = torch.clamp(h, -10, 10)
        if torch.isinf(h).any() or h.isnan().any():
            h = torch.nan_to_num(h)
        return h


def test_a_check_of_what_the_model_computes_is_answered_as_if_it_were_finite() -> None:
    case = built(Clamps)
    model = case.model()
    assert_follows(case, model, eager_trajectory(case, 2), (1, 1))
    found = ts.explain_capture(model, case.loss_fn, case.batches(1)[0])
    lines = ("if not torch.isfinite(h).all():", "if torch.isinf(h).any() or h.isnan().any():")
    assert all(any(line in place for place in found.skipped_checks) for line in lines)


def test_a_check_of_the_batch_itself_is_refused() -> None:
    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        if torch.isnan(y).any():  # what is missing, perhaps
            y = torch.nan_to_num(y)
        return (model(x) - y).square().mean()

    with pytest.raises(NotImplementedError, match=r"if torch.isnan\(y\).any\(\)"):
        ts.explain_capture(nn.Linear(WIDTH, WIDTH), loss_fn, (torch.ones(2, WIDTH), torch.ones(2, WIDTH)))
