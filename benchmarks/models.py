"""The torch models that are timed, their losses, batches and plans."""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

VOCAB, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 512, 256, 6, 8, 128, 8
MLP_SIZES, MLP_BATCH = (784, 1024, 1024, 1024, 10), 256


class Block(nn.Module):
    """A pre-norm transformer block with separate q, k, v and o."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then think: `(B, T, D)` to the same."""
        y = self.ln1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """The demo's GPT: learned positions, tied head, no dropout."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(Block(width, HEADS) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.tok.weight.data.mul_(0.02)
        self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `(B, T)` to logits `(B, T, V)`."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def gpt_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the next token."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def gpt_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets, `(B, T)` int64 each."""
    text = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH + 1))
    return torch.from_numpy(text[:, :-1].copy()), torch.from_numpy(text[:, 1:].copy())


def gpt_specs() -> dict[str, P]:
    """Megatron's split: q, k, v, up by column and o, down by row."""
    column = {f"h.*.{name}.{kind}": P("model") for name in ("q", "k", "v", "up") for kind in ("weight", "bias")}
    return column | {f"h.*.{name}.weight": P(None, "model") for name in ("o", "down")}


def mlp() -> nn.Sequential:
    """The tutorial's MLP."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(MLP_SIZES)]
    return nn.Sequential(*(f for layer in layers[:-1] for f in (layer, nn.ReLU())), layers[-1])


def mlp_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pictures `(B, 784)` and classes `(B,)`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((MLP_BATCH, MLP_SIZES[0]), np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 10, MLP_BATCH))


def mlp_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp_specs() -> dict[str, P]:
    """Column, row, column, whole."""
    return {
        "0.weight": P("model"),
        "0.bias": P("model"),
        "2.weight": P(None, "model"),
        "4.weight": P("model"),
        "4.bias": P("model"),
        "6.weight": P(None, "model"),
    }


def many_linears(count: int = 150) -> nn.Sequential:
    """Tiny layers with `2 * count` parameters."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
