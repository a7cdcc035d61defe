"""What make_train_step is given, and refuses."""

import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import step_of
from tests.tables.cases import squared_error


def test_a_mesh_without_the_batch_axis() -> None:
    mesh = ts.make_mesh(data=8)
    with refuses(r"mesh \(data=8\) has none.*batch_spec=P\('data'\)"):
        step_of(nn.Linear(2, 2), squared_error, mesh=mesh)
    step = step_of(nn.Linear(8, 4), squared_error, mesh=mesh, batch_spec=P("data"))
    step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))
