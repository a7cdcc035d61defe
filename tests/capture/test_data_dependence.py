"""Where Python asks a tensor for its value to decide about something, which is refused."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.tables.semantics import WIDTH

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


def clamps(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if not torch.isfinite(y).all():
        y = torch.clamp(y, -10, 10)
    return y.sum()


def replaces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x).log()
    if torch.isnan(y).any():
        y = torch.nan_to_num(y)
    return y.sum()


def replaces_by_number(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = 1 / model(x)
    if y.isinf().sum().item() > 0:
        y = torch.nan_to_num(y)
    return y.sum()


def returns_early(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if torch.isnan(y).any().item():
        return x.sum()
    return y.sum()


@pytest.mark.parametrize("loss_fn", [clamps, replaces, replaces_by_number, returns_early])
def test_a_branch_on_whether_values_are_finite_is_refused(loss_fn: Any) -> None:
    with pytest.raises(NotImplementedError, match=rf"in {loss_fn.__name__}: if .*\n.*torch\.where"):
        ts.explain_capture(nn.Linear(WIDTH, WIDTH), loss_fn, torch.ones(2, WIDTH))


def warns(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if torch.isnan(y).any():
        warnings.warn("not a number", stacklevel=1)
    if not y.isfinite().all().item():
        raise ValueError("not finite")
    return y.sum()


def test_a_branch_that_only_warns_or_raises_is_skipped() -> None:
    found = ts.explain_capture(nn.Linear(WIDTH, WIDTH), warns, torch.ones(2, WIDTH))
    lines = ("if torch.isnan(y).any():", "if not y.isfinite().all().item():")
    assert [any(line in place for place in found.skipped_checks) for line in lines] == [True, True]
