"""Modules and functions that PyTorch has compiled or scripted run as what they were made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.semantics import WIDTH, built
from torch_shard._common.validate import unwrapped

pytestmark = [  # PyTorch's own, in the eager run
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Within(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.a, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.a(x))


def compile_in_place() -> nn.Module:
    model = layers()
    model.compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: torch.compile(layers(), backend="eager"),
    "compiled in place": compile_in_place,
    "compiled submodule": lambda: Within(torch.compile(layers(), backend="eager")),
    "compiled function": lambda: Within(torch.compile(lambda x: x.sin() + x, backend="eager")),
    "scripted": lambda: torch.jit.script(layers()),
    "scripted submodule": lambda: Within(torch.jit.script(layers())),
    "scripted with buffers": lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
    "traced": lambda: torch.jit.trace(layers(), torch.ones(2, WIDTH)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_runs_as_the_plain_module(name: str) -> None:
    build = COMPILED[name]
    case = built(lambda: unwrapped(build()))  # names are those of the module within
    torch.manual_seed(0)
    assert_follows(case, build(), eager_trajectory(case, 2), (4, 2))


def test_a_scripted_model_is_one_function_at_each_look() -> None:
    """TorchScript's executor rewrites a script after it has seen it run."""
    model = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()))
    mesh = ts.make_mesh(batch=4, model=2)
    options: Any = {"mesh": mesh, "plan": ts.plans.fsdp_tp(model, mesh)}
    step = ts.make_train_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters()), **options)
    state = step.init(seed=0)
    for _ in range(3):
        state, _ = step(state, torch.ones(8, WIDTH))
    assert step.num_compiles == 1
