"""What make_train_step is given, and refuses."""

import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.tables.cases import WHOLE, squared_error


def test_a_mesh_without_the_batch_axis() -> None:
    mesh = ts.make_mesh(data=8)
    with refuses(r"mesh \(data=8\) has none.*batch_spec=P\('data'\)"):
        ts.make_train_step(nn.Linear(2, 2), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)
    step = ts.make_train_step(
        nn.Linear(8, 4), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE, batch_spec=P("data")
    )
    step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))
