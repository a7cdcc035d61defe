"""Models that others timed and transformers do not have, in plain torch, on the meta device."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of MaxText's default model of 2023, at a `global_parameter_scale` of 16."""

    layers: int = 32
    width: int = 5120
    hidden: int = 32768
    heads: int = 32
    head: int = 256
    vocab: int = 32768

    @property
    def num_params(self) -> int:
        """Without the norms."""
        return self.layers * (4 * self.width * self.heads * self.head + 2 * self.width * self.hidden) + (
            self.vocab * self.width
        )

    def flops(self, rows: int, length: int) -> float:
        """Of so many rows, by MaxText's formula."""
        attention = 12 * self.layers * self.heads * self.head * length**2 / 2
        return rows * (6 * self.num_params * length + attention)


class Layer(nn.Module):
    """Attention beside an MLP with a rectifier, of one norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner = sizes.heads * sizes.head
        self.heads, self.norm = sizes.heads, nn.RMSNorm(sizes.width, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(sizes.width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, sizes.width, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """As MaxText's `DecoderLayer`."""
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2)) + self.down(F.relu(self.up(y)))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Default(nn.Module):
    """MaxText's default model of 2023: the embedding is the head, too."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(sizes.vocab, sizes.width), sizes.head
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits."""
        half = self.head // 2
        base = 10000 ** (-torch.arange(half, device=ids.device) / half)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * base
        x = self.embed(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)


class Dropping(nn.Module):
    """Experts that take at most so many tokens of a row, which are sent and brought back by products with masks.

    Shapes: B rows, T time, D model, E experts, C places of each, F hidden.
    """

    def __init__(self, width: int, hidden: int, *, experts: int = 8, chosen: int = 2, room: float = 1.25) -> None:
        super().__init__()
        self.experts, self.chosen, self.room = experts, chosen, room
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, width, hidden)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """As the implementation `dropping` of torchprime's Mixtral."""
        weights_BTE = self.gate(x_BTD).softmax(-1)
        taken_BTKE = F.one_hot(weights_BTE.topk(self.chosen, -1).indices, self.experts)
        place_BTKE = taken_BTKE * taken_BTKE.flatten(1, 2).cumsum(1).view_as(taken_BTKE)
        room = int(x_BTD.shape[1] * self.chosen / self.experts * self.room)
        kept_BTE = (taken_BTKE * (place_BTKE <= room)).sum(2)
        place_BTE = place_BTKE.sum(2) * kept_BTE
        combine_BTEC = (weights_BTE * kept_BTE)[..., None] * F.one_hot(place_BTE, room + 1)[..., 1:]
        combine_BTEC = combine_BTEC.to(x_BTD.dtype)
        sent = torch.einsum("btd,btec->ebcd", x_BTD, combine_BTEC.bool().to(x_BTD.dtype))
        inner = F.silu(torch.einsum("ebcd,edf->ebcf", sent, self.w1)) * torch.einsum("ebcd,edf->ebcf", sent, self.w3)
        return torch.einsum("ebcd,btec->btd", torch.einsum("ebcf,efd->ebcd", inner, self.w2), combine_BTEC)
