"""Each thing that torch lets a forward do, trained for two steps on one device and a mesh, against eager torch."""

import itertools
from typing import Any

import numpy as np
import optax
import pytest
import torch

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables import semantics
from tests.tables.cases import Case, make_mesh

ROWS = [
    *itertools.chain(semantics.AUTOGRAD, semantics.WRITES, semantics.STATE, semantics.PARAMETERS, semantics.CONTROL)
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_equals_eager_torch(case: Case) -> None:
    trajectory, model = eager_trajectory(case, num_steps=2), case.model()
    assert_follows(case, model, trajectory, (1, 1))
    assert_follows(case, model, trajectory, (4, 2))


def test_adapters_inside_of_forward_see_the_parameters_that_they_close_over() -> None:
    """JAX's transforms of what closes over parameters, under train and eval, with and without autocast around."""

    def with_adapters(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = ts.jax_checkpoint(lambda z: m.a(z).tanh())(x) + ts.jax_vmap(lambda z: m.b(z).sin())(x)
        return ts.jax_jit(m.b)(ts.jax_grad(lambda z: m.a(z).cos().sum())(y))

    def without(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x).tanh() + torch.vmap(lambda z: m.b(z).sin())(x)
        return m.b(torch.func.grad(lambda z: m.a(z).cos().sum())(y))

    model, case = semantics.case(with_adapters).model(), semantics.case(without)
    trajectory = eager_trajectory(case, num_steps=2)
    assert_follows(case, model, trajectory, (1, 1))
    assert_follows(case, model, trajectory, (4, 2))
    evaluate = ts.make_eval_step(model, case.loss_fn, mesh=make_mesh((4, 2)), plan=case.plan)
    step = ts.make_train_step(model, case.loss_fn, optax.sgd(0.1), mesh=make_mesh((4, 2)), plan=case.plan)
    found = evaluate(step.init(), case.batches(1)[0])["loss"]
    np.testing.assert_allclose(found, trajectory[0]["loss"], rtol=case.rtol)
