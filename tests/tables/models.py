"""Models as people write them in plain torch, each with its batch, its loss and its plan on a (4, 2) mesh."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

from tests.tables.cases import BATCH, Case

NORM_RTOL = 2e-4  # norms divide by small deviations


class Diffusion(nn.Module):
    """One block of a denoiser: GroupNorm and SiLU, shifted and scaled by the time, then attention over pixels."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2 * channels))
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, channels) for _ in range(3))
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-2, 0.3, 20), 0))

    def forward(self, x_BCHW: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(100.0) * torch.arange(4) / 4)
        angles = t_B[:, None].float() * frequencies
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None].chunk(2, 1)
        x_BCHW = self.inner(x_BCHW)
        h = self.norm2(self.conv1(F.silu(self.norm1(x_BCHW)))) * (1 + scale) + shift
        x_BCHW = x_BCHW + self.conv2(F.silu(h))
        pixels_BNC = self.norm3(x_BCHW).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(pixels_BNC, pixels_BNC, pixels_BNC, need_weights=False)
        return self.outer(x_BCHW + mixed.transpose(1, 2).unflatten(2, x_BCHW.shape[2:]))


def denoising(model: Any, batch: Any) -> torch.Tensor:
    image, noise, t_B = batch
    kept = model.alphas[t_B].view(-1, 1, 1, 1)
    return F.mse_loss(model(kept.sqrt() * image + (1 - kept).sqrt() * noise, t_B), noise)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.Sigmoid())


def evidence(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The noise comes with the batch, since torch's stream and JAX's differ."""
    x, noise = batch
    mean, log_var = model.encoder(x).chunk(2, -1)
    again = model.decoder(mean + torch.exp(0.5 * log_var) * noise)
    likelihood = F.binary_cross_entropy(again, x, reduction="sum") / len(x)
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), -1).mean()
    return likelihood + divergence, {"divergence": divergence}


def evidence_loss(model: Any, batch: Any) -> torch.Tensor:
    return evidence(model, batch)[0]


class Graph(nn.Module):
    """Messages along edges, summed at their targets, two rounds; then a mean over each graph's nodes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, width), nn.Linear(width, 1)
        self.message = nn.ModuleList(nn.Linear(2 * width + 1, width) for _ in range(2))
        self.update = nn.GRUCell(width, width)

    def forward(self, kinds_N: torch.Tensor, edges_E2: torch.Tensor, length_E: torch.Tensor) -> torch.Tensor:
        h_NC = self.embed(kinds_N)
        source_E, target_E = edges_E2.unbind(1)
        for message in self.message:
            m_EC = torch.relu(message(torch.cat([h_NC[source_E], h_NC[target_E], length_E[:, None]], -1)))
            inbox_NC = torch.zeros_like(h_NC).index_add_(0, target_E, m_EC)
            h_NC = self.update(inbox_NC, h_NC)
        return self.head(h_NC)


def graph_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    kinds_N, edges_E2, length_E, graph_N, wanted_G = batch
    out_N1 = model(kinds_N, edges_E2, length_E)
    size_G = torch.zeros_like(wanted_G).index_add_(0, graph_N, torch.ones_like(out_N1[:, 0]))
    mean_G = torch.zeros_like(wanted_G).scatter_add_(0, graph_N, out_N1[:, 0]) / size_G.clamp(min=1)
    return F.mse_loss(mean_G, wanted_G)


def graphs() -> Any:
    nodes, edges = 2 * BATCH, 4 * BATCH
    kinds, ends = torch.randint(0, 5, (nodes,)), torch.randint(0, nodes, (edges, 2))
    return kinds, ends, torch.rand(edges), torch.arange(nodes) // 4, torch.randn(nodes // 4)


class Energy(nn.Module):
    """Energy of atoms from their distances; its forces are a gradient, which the loss differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 3, 8))
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x_BA3: torch.Tensor) -> torch.Tensor:
        first, second = torch.triu_indices(x_BA3.shape[1], x_BA3.shape[1], offset=1)
        r_BP = (x_BA3[:, first] - x_BA3[:, second]).norm(dim=-1)
        return self.layers(torch.exp(-((r_BP[..., None] - self.centres) ** 2))).sum((1, 2))


def forces(model: nn.Module, batch: Any) -> torch.Tensor:
    positions, energy_B, force_BA3 = batch
    positions.requires_grad_(True)
    found_B = model(positions)
    found_BA3 = -torch.autograd.grad(found_B.sum(), positions, create_graph=True)[0]
    return F.mse_loss(found_B, energy_B) + 10 * F.mse_loss(found_BA3, force_BA3)


def classes(*shape: int) -> Any:
    return lambda: (torch.randn(BATCH, *shape), torch.randint(0, 4, (BATCH,)))


def atoms() -> Any:
    return torch.randn(BATCH, 5, 3), torch.randn(BATCH), torch.randn(BATCH, 5, 3)


MODELS = [
    Case(
        "diffusion",
        Diffusion,
        lambda: (torch.randn(BATCH, 3, 4, 4), torch.randn(BATCH, 3, 4, 4), torch.randint(0, 20, (BATCH,))),
        {"conv1.weight": P("model"), "conv2.weight": P(None, "model"), "time.0.weight": P("model")},
        loss_fn=denoising,
        rtol=NORM_RTOL,
    ),
    Case(
        "vae",
        VAE,
        lambda: (torch.rand(BATCH, 12), torch.randn(BATCH, 4)),
        {"*.0.weight": P("model"), "*.2.weight": P(None, "model")},
        loss_fn=evidence_loss,
    ),
    Case("graph", Graph, graphs, {"message.*.weight": P("model"), "update.*": P("model")}, loss_fn=graph_loss),
    Case(
        "forces",
        Energy,
        atoms,
        {"layers.0.weight": P("model"), "layers.2.weight": P(None, "model")},
        loss_fn=forces,
        rtol=1e-4,
    ),
]
