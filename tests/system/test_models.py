"""Models as people write them in plain torch, trained for some steps on a mesh, against eager torch."""

import copy
import dataclasses
from typing import Any

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_close, assert_follows, eager_trajectory
from tests.tables.cases import BATCH, Case, make_mesh
from tests.tables.models import MODELS


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_equals_eager_torch(case: Case) -> None:
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def critic_loss(gan: Any, batch: Any) -> torch.Tensor:
    real, noise = batch
    wrong = F.softplus(gan.critic(gan.generator(noise).detach())).mean()
    return wrong + F.softplus(-gan.critic(real)).mean()


def generator_loss(gan: Any, batch: Any) -> torch.Tensor:
    return F.softplus(-gan.critic(gan.generator(batch[1]))).mean()


def only(part: str, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Train one part of the model and leave the other as it is."""

    def label(params: dict[str, Any]) -> dict[str, str]:
        return {name: "train" if name.startswith(part) else "keep" for name in params}

    return optax.partition({"train": optimizer, "keep": optax.set_to_zero()}, label)


def eager_gan(gan: Any, batches: list[Any]) -> list[tuple[float, float]]:
    adam_c = torch.optim.Adam(gan.critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    sgd_g = torch.optim.SGD(gan.generator.parameters(), lr=5e-2)
    losses = []
    for batch in batches:
        adam_c.zero_grad()
        (wrong := critic_loss(gan, batch)).backward()
        adam_c.step()
        sgd_g.zero_grad()
        (fooled := generator_loss(gan, batch)).backward()
        sgd_g.step()
        losses.append((wrong.item(), fooled.item()))
    return losses


def test_two_optimizers_in_turn() -> None:
    """Two steps over one module: each hands the tensors on to the other and keeps its own moments."""
    torch.manual_seed(0)
    gan, batches = GAN(), [(torch.randn(BATCH, 8), torch.randn(BATCH, 4)) for _ in range(3)]
    rules = {"*.0.weight": P("model"), "critic.2.weight": P(None, "model")}
    on_mesh: dict[str, Any] = {"mesh": make_mesh((4, 2)), "plan": ts.ShardingPlan(rules, default=P())}
    train_c = ts.make_train_step(gan, critic_loss, only("critic", optax.adam(1e-2, b1=0.5, b2=0.9)), **on_mesh)
    train_g = ts.make_train_step(gan, generator_loss, only("generator", optax.sgd(5e-2)), **on_mesh)
    state_c, state_g = train_c.init(), train_g.init()
    wanted = eager_gan(gan_in_torch := copy.deepcopy(gan), batches)
    for batch, losses in zip(batches, wanted, strict=True):
        state_c, metrics_c = train_c(state_c, batch)
        state_g = dataclasses.replace(state_g, params=state_c.params, buffers=state_c.buffers)
        state_g, metrics_g = train_g(state_g, batch)
        state_c = dataclasses.replace(state_c, params=state_g.params, buffers=state_g.buffers)
        np.testing.assert_allclose((metrics_c["loss"], metrics_g["loss"]), losses, rtol=1e-5)
    for name, value in gan_in_torch.state_dict().items():
        assert_close(state_c.tensors[name], value.numpy(), 1e-4, 1e-6, name)
