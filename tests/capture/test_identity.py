"""Parameters that the user's code knows by identity: refused, as others are in their places in a capture."""

import enum
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.steps import sgd_step

X = torch.ones(8, 4)


class Mode(enum.Enum):
    MEAN = 1


def penalty(model: nn.Module, x: torch.Tensor, chosen: Callable[[nn.Parameter], Any]) -> torch.Tensor:
    return model(x).square().mean() + sum(p.square().sum() for p in model.parameters() if chosen(p))


def by_id(model: nn.Module) -> Any:
    skip = {id(model.weight)}
    return lambda m, x: penalty(m, x, lambda p: id(p) not in skip)


def by_one_id(model: nn.Module) -> Any:
    skip = id(model.weight)
    return lambda m, x: penalty(m, x, lambda p: id(p) != skip)


def by_element(model: nn.Module) -> Any:
    skip = frozenset([model.weight])
    return lambda m, x: penalty(m, x, lambda p: p not in skip)


def by_key(model: nn.Module) -> Any:
    factors = dict.fromkeys(model.parameters(), 2.0)
    return lambda m, x: penalty(m, x, lambda p: factors.get(p, 0.0))


def by_subscript(model: nn.Module) -> Any:
    factors = dict.fromkeys(model.parameters(), 2.0)
    return lambda m, x: penalty(m, x, lambda p: factors[p])


def by_key_of_a_proxy(model: nn.Module) -> Any:
    factors = types.MappingProxyType(dict.fromkeys(model.parameters(), 2.0))
    return lambda m, x: penalty(m, x, lambda p: factors.get(p, 0.0))


def by_is(model: nn.Module) -> Any:
    skip = model.weight
    return lambda m, x: penalty(m, x, lambda p: p is not skip)


def by_operator(model: nn.Module) -> Any:
    skip = model.weight
    return lambda m, x: penalty(m, x, lambda p: operator.is_not(p, skip))


def by_is_in_a_list(model: nn.Module) -> Any:
    skips = [model.weight]
    return lambda m, x: penalty(m, x, lambda p: all(p is not skip for skip in skips))


def by_id_within(model: nn.Module) -> Any:
    skips = [model.weight]
    return lambda m, x: penalty(m, x, lambda p: id(p) not in {id(skip) for skip in skips})


class Criterion(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ids = [id(p) for p in model.parameters()]

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return penalty(model, x, lambda p: id(p) in self.ids)


CASES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "id": (by_id, r"  skip has the id\(\) of weight\n"),
    "one id": (by_one_id, r"  skip has the id\(\) of weight\n"),
    "element": (by_element, r"  skip has as keys or elements weight\n"),
    "key": (by_key, r"  factors has as keys or elements weight, bias\n"),
    "key of a proxy": (by_key_of_a_proxy, r"  factors has as keys or elements weight, bias\n"),
    "subscript": (by_subscript, r"  factors has as keys or elements weight, bias\n"),
    "is": (by_is, r"test_identity\.py\", line \d+, .*skip\)\n  compares by identity, and skip has weight\n"),
    "operator": (by_operator, r"  compares by identity, and skip has weight\n"),
    "is, of a list": (by_is_in_a_list, r"  compares by identity, and skips has weight\n"),
    "id within": (by_id_within, r"  compares by identity, and skips has weight\n"),
    "attribute": (Criterion, r"  Criterion\.ids has the id\(\) of weight, bias\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_looks_for_parameters_by_identity_is_refused(name: str) -> None:
    make, words = CASES[name]
    model = nn.Linear(4, 2)
    step = sgd_step(model, make(model))
    found = rf"(?s)^make_train_step: the loss looks for tensors.*{words}.*Compare names"
    with pytest.raises(NotImplementedError, match=found):
        step(step.init(), X)


def test_what_only_has_parameters_or_compares_other_things_is_right() -> None:
    model, mode, other = nn.Linear(4, 2), Mode.MEAN, nn.Linear(4, 2)
    params, known = list(model.parameters()), {id(other): 2.0, other.weight: 3.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(X).sum().backward()
    optimizer.step()  # its state has parameters as keys

    def loss_fn(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        fits = mode is Mode.MEAN and type(m) is nn.Linear and x.dtype is torch.float32 and m.bias is not None
        factor = optimizer.param_groups[0]["lr"] * known[other.weight] if fits else 0.0
        return m(x).square().mean() + factor * len(known) * sum(p.sum() for p in params)

    wanted = loss_fn(model, X).detach()
    step = sgd_step(model, loss_fn)
    _, metrics = step(step.init(), X)
    torch.testing.assert_close(torch.tensor(float(metrics["loss"])), wanted)
