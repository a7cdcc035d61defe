"""Parameters of which one dim is split over several axes, in another order than the mesh has them."""

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts


class Grouped(nn.Module):
    """A matrix that is read in groups, as heads of attention are, and layers of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 4))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("bgi,goi->bgo", x, self.mix.view(4, 2, 4)).flatten(1)
        for layer in self.layers:
            x = x + torch.einsum("bgi,goi->bgo", x.view(-1, 4, 2), layer.weight.view(4, 2, 4, 2)[:, :, 0]).flatten(1)
        return x


@pytest.mark.parametrize("spec", [P(("model", "batch")), P(("batch", "model"))], ids=str)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_values_of_a_matrix_that_is_read_in_groups(spec: P, accumulate_steps: int) -> None:
    """Shardy would put wrong values into gradients; tests/system/test_upstream.py."""
    torch.manual_seed(0)
    plan = ts.ShardingPlan({"**": spec})
    step = ts.make_train_step(
        Grouped(),
        lambda model, x: model(x).square().mean(),
        optax.sgd(0.1),
        mesh=ts.make_mesh(batch=4, model=2),
        plan=plan,
        accumulate_steps=accumulate_steps,
    )
    step.prove(step.init(), torch.randn(16, 4, 4)).raise_if_different()
