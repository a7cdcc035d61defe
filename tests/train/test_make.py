"""What make_train_step is given, and refuses."""

import jax
import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.tables.cases import WHOLE, make_mesh, squared_error


def test_a_mesh_without_the_batch_axis() -> None:
    mesh = ts.make_mesh(data=8)
    with refuses(r"mesh \(data=8\) has none.*batch_spec=P\('data'\)"):
        ts.make_train_step(nn.Linear(2, 2), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)
    step = ts.make_train_step(
        nn.Linear(8, 4), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE, batch_spec=P("data")
    )
    step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))


def test_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    with refuses(r"make_train_step: every mesh axis must be Auto.*make_mesh\(batch=8\)"):
        ts.make_train_step(nn.Linear(2, 2), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)


def test_wrong_kinds_of_arguments() -> None:
    mesh, model = make_mesh((8, 1)), nn.Linear(2, 2)
    with refuses("model must be a Module, got builtin", TypeError):
        ts.make_train_step(torch.sin, squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)  # pyright: ignore
    with refuses("plan must be a ShardingPlan, got dict", TypeError):
        ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=mesh, plan={})  # pyright: ignore
    with refuses(r"must be an optimizer of torch.optim.* or an optax gradient transformation.*got float", TypeError):
        ts.make_train_step(model, squared_error, 0.1, mesh=mesh, plan=WHOLE)  # pyright: ignore
    with refuses("no parameter of Linear has requires_grad=True"):
        ts.make_train_step(nn.Linear(2, 2).requires_grad_(False), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)
