"""Each thing that torch lets a forward do, trained for two steps on a mesh, against eager torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.steps import anew
from tests.tables import semantics
from tests.tables.cases import Case

AT_ONCE = 5  # a program of all would take as long as they take together, and be one test
TABLES = {name: getattr(semantics, name) for name in ("AUTOGRAD", "WRITES", "STATE", "PARAMETERS", "CONTROL")}
PARTS = [(name, start) for name, table in TABLES.items() for start in range(0, len(table), AT_ONCE)]


class Rows(nn.Module):
    """The modules of a table side by side, so that one program has them all; all is named by their row."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.rows = nn.ModuleDict({case.name: case.build() for case in cases})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: row(x) for name, row in self.rows.items()}


def sum_of_errors(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x, y = batch
    errors = {name: nn.functional.mse_loss(out, y) for name, out in model(x).items()}
    return sum(errors.values()), errors


def side_by_side(cases: list[Case]) -> Case:
    rules = {f"rows.{case.name}.{name}": spec for case in cases for name, spec in case.rules.items()}
    return Case("rows", lambda: Rows(cases), cases[0].batch, rules, loss_fn=sum_of_errors)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize(("table", "start"), PARTS)
def test_equals_eager_torch(table: str, start: int) -> None:
    """Also where the step looks at the loss again before its second call."""
    case = side_by_side(TABLES[table][start : start + AT_ONCE])
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2), look_again=True)


def test_adapters_inside_of_forward_see_the_parameters_that_they_close_over() -> None:
    """JAX's transforms of what closes over parameters, under train and eval, with and without autocast around."""

    def with_adapters(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = ts.jax_checkpoint(lambda z: m.a(z).tanh())(x) + ts.jax_vmap(lambda z: m.b(z).sin())(x)
        return ts.jax_jit(m.b)(ts.jax_grad(lambda z: m.a(z).cos().sum())(y))

    def without(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x).tanh() + torch.vmap(lambda z: m.b(z).sin())(x)
        return m.b(torch.func.grad(lambda z: m.a(z).cos().sum())(y))

    adapted, case = semantics.case(with_adapters), semantics.case(without)
    trajectory = eager_trajectory(case, num_steps=2)
    step = assert_follows(case, adapted.model(), trajectory, (4, 2))
    found = step.evaluation()(anew(step, adapted.model()).init(), case.batches(1)[0])["loss"]
    np.testing.assert_allclose(found, trajectory[0]["metrics"]["loss"], rtol=case.rtol)
