"""Where Python asks a tensor for its value to decide about something, which is refused."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.derivatives import agrees
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


def clamps(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if not torch.isfinite(y).all():
        y = torch.clamp(y, -10, 10)
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


@pytest.mark.parametrize("loss_fn", [clamps, replaces_by_number, returns_early])
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


def equal(x: torch.Tensor) -> torch.Tensor:
    first, second = x.sin()[:, None], x.sin()[:, None]
    return (first * second).sum() if torch.equal(first, second) else first.sum() - second.mean()


def test_what_is_computed_twice_is_equal() -> None:
    agrees(equal, X)


def test_not_a_number_that_is_taken_to_equal_itself_is_loud() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.nansum() if torch.equal(x * 2, x * 2) else torch.zeros(())

    x = torch.tensor([1.0, torch.nan])
    assert fn(x) == 0
    found, grad = ts.jax_value_and_grad(fn)(x)
    assert torch.isnan(found.cpu())
    assert torch.isnan(grad.cpu()).all()


def test_a_tensor_equals_itself_whatever_was_written_to_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        view = y[1:]
        y.mul_(2)
        return view.sum() if torch.equal(view, view) else y.sum()

    torch.testing.assert_close(ts.jax_jit(fn)(X).cpu(), fn(X))


def test_tensors_of_other_shapes_are_not_equal() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.equal(x, x[1:]) else x.cos()

    torch.testing.assert_close(ts.jax_jit(fn)(X).cpu(), fn(X))


def test_whole_numbers_are_equal_where_no_result_could_say_nan() -> None:
    def of(x: torch.Tensor) -> torch.Tensor:
        y, z = (x * 2, x * 2)
        return y.argmax() if torch.equal(y, z) else y.argmin()

    assert ts.jax_jit(of)(torch.tensor([1, 3, 2])).item() == 1
    with pytest.raises(NotImplementedError, match=r"(?s)torch\.equal\(y, z\).*equals itself.*NaN.*Return a floating-p"):
        ts.jax_jit(of)(X)


def written_after(x: torch.Tensor) -> torch.Tensor:
    first, second = x * 2, x * 2
    view = first[:2]
    first.add_(1)
    return view.sum() if torch.equal(view, second[:2]) else second.sum()


def other_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.sum() if torch.equal(x / 0.0, x / -0.0) else -x.sum()


@pytest.mark.parametrize("fn", [written_after, other_numbers, lambda x: x.sum() if torch.equal(x, x + 0) else -x.sum()])
def test_what_may_differ_is_refused(fn: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.equal\(.*\nHere Python needs the value"):
        ts.jax_jit(fn)(X)
