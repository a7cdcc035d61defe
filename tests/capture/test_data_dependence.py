"""Where Python asks a tensor for its value: branches that are checks, by bytecode, and decisions, which are refused."""

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from torch_shard._capture.data_dependence import leads_only_to_raise


class Asked:
    """Stands for a tensor: says what `leads_only_to_raise` says, or remembers that it cannot."""

    answer: bool | None = None

    def __bool__(self) -> bool:
        self.answer = leads_only_to_raise(sys._getframe(1))
        return bool(self.answer)


def plain_assert(x: Any) -> None:
    exec(compile("assert x, 'message'", "f", "exec"), {"x": x})  # pytest rewrites those of this file


def rewritten_assert(x: Any) -> None:
    assert x, f"message {x!r}"


def raise_if(x: Any) -> None:
    if x:
        raise ValueError("bad")


def raise_if_not(x: Any) -> None:
    if not x:
        detail = "long" if x is None else "short"
        raise ValueError(f"bad {detail}")


def raise_if_explicit(x: Any) -> None:
    if bool(x):
        raise ValueError("bad")


def raise_in_else(x: Any) -> int:
    if x:
        return 1
    else:
        raise ValueError("bad")


def raise_in_with(x: Any) -> None:
    with pytest.MonkeyPatch.context():
        if x:
            raise ValueError("bad")


def raise_of_any(x: Any) -> None:
    if any([x, x]):
        raise ValueError("bad")


CHECKS = [
    (plain_assert, True),
    (rewritten_assert, True),
    (raise_if, False),
    (raise_if_not, True),
    (raise_if_explicit, False),
    (raise_in_else, True),
    (raise_in_with, False),
    (raise_of_any, False),
]


@pytest.mark.parametrize(("check", "passes"), CHECKS, ids=[row[0].__name__ for row in CHECKS])
def test_checks_pass(check: Any, passes: bool) -> None:
    asked = Asked()
    check(asked)  # and does not raise
    assert asked.answer is passes


def choice(x: Any) -> int:
    return 1 if x else 2


def branch(x: Any) -> int:
    if x:
        return 1
    return 2


def caught(x: Any) -> int:
    try:
        if x:
            raise ValueError("bad")
    except ValueError:
        return 1
    return 2


def sometimes(x: Any, also: bool = False) -> None:
    if x:  # noqa: SIM102  (this shape is what is tested)
        if also:
            raise ValueError("bad")


def loop(x: Any) -> None:
    while x:
        return


def value(x: Any) -> bool:
    return bool(x)


def both(x: Any) -> None:
    if x and x:
        raise ValueError("bad")


@pytest.mark.parametrize("decision", [choice, branch, caught, sometimes, loop, value, both], ids=lambda f: f.__name__)
def test_decisions_do_not(decision: Any) -> None:
    asked = Asked()
    decision(asked)
    assert asked.answer is None


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
