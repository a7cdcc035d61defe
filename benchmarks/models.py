"""The torch models that are timed, as a user writes them: no line of theirs knows of JAX."""

import itertools

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block, with separate q, k, v or one fused layer."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then think: `(B, T, D)` to the same."""
        y = self.ln1(x)
        parts = self.qkv(y).chunk(3, -1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """GPT-2's architecture: learned positions, tied head, exact gelu, no dropout."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int, fused: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, fused) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tok.weight.data.mul_(0.02)
        self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `(B, T)` to logits `(B, T, V)`."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on `(B, N, T, H)`, halves paired as Llama has them."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention with rotary positions, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head = width // heads
        self.ln1, self.ln2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, T, D)` to the same."""
        y = self.ln1(x)
        q = rotate(self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        k = rotate(self.k(y).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2))
        v = self.v(y).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        y = self.ln2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama's architecture, with a head of its own."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int, length: int = 0
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.tok = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.ln = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tok.weight.data.mul_(0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `(B, T)` to logits `(B, T, V)`."""
        x = self.tok(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.skip = None
        if stride > 1 or inner != width:
            self.skip = nn.Sequential(nn.Conv2d(inner, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, C, Y, X)` to `(B, W, Y / stride, X / stride)`."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(nn.Module):
    """ResNet-18 for pictures of 32 x 32: a stem of 3 x 3, four stages of two blocks."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0])
        sizes = [(widths[0], widths[0], 1), *((a, b, 2) for a, b in itertools.pairwise(widths))]
        blocks = ((Residual(a, b, s), Residual(b, b, 1)) for a, b, s in sizes)
        self.blocks = nn.Sequential(*itertools.chain.from_iterable(blocks))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, 3, 32, 32)` to `(B, 10)`."""
        return self.head(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


def mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    """The tutorial's MLP."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(f for layer in layers[:-1] for f in (layer, nn.ReLU())), layers[-1])


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the next token."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(model(batch[0]), batch[1])


def token_batch(rows: int, length: int, vocab: int) -> Batch:
    """Random tokens and targets, `(rows, length)` int64 each."""
    text = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def class_batch(rows: int, *shape: int) -> Batch:
    """Random pictures `(rows, *shape)` and classes `(rows,)`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, *shape, generator=generator), torch.randint(0, 10, (rows,), generator=generator)


MEGATRON = {f"h.*.{name}.weight": P("model") for name in ("q", "k", "v", "up")} | {
    f"h.*.{name}.weight": P(None, "model") for name in ("o", "down")
}
GPT_SPECS = MEGATRON | {f"h.*.{name}.bias": P("model") for name in ("q", "k", "v", "up")}
FUSED_SPECS = {n.replace(".q.", ".qkv."): s for n, s in GPT_SPECS.items() if ".k." not in n and ".v." not in n}
LLAMA_SPECS = MEGATRON | {"h.*.gate.weight": P("model")}
MLP_SPECS = {
    "0.weight": P("model"),
    "0.bias": P("model"),
    "2.weight": P(None, "model"),
    "4.weight": P("model"),
    "4.bias": P("model"),
    "6.weight": P(None, "model"),
}
RESNET_SPECS = {f"blocks.*.conv{i}.weight": P(*axes, "model") for i, axes in ((1, ()), (2, (None,)))} | {
    f"blocks.*.bn1.{name}": P("model") for name in ("weight", "bias", "running_mean", "running_var")
}
