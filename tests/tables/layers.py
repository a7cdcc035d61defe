"""Models with repeated layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH = 8, 4


class Block(nn.Module):
    """Residual MLP; everything that a test varies is an option."""

    def __init__(self, scale: float = 1.0, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after the other."""

    Layer: Callable[[], nn.Module] = Block

    def __init__(self, block: Callable[[], nn.Module] | None = None, depth: int = DEPTH) -> None:
        super().__init__()
        block = block or self.Layer
        self.start, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.up(x)))


class Counting(Block):
    """Assigns a buffer anew, and writes to another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return super().forward(x) - self.mean


class Attending(nn.Module):
    """Takes a mask, positions and a memory; returns more than it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, memory: Any, mask: torch.Tensor, cache: None = None) -> dict[str, Any]:
        keys = x if memory is None else memory[0]
        scores = self.q(x) @ self.k(keys).transpose(-1, -2) + mask
        weights = scores.softmax(-1)
        return {"x": x + weights @ self.v(keys), "weights": weights, "memory": memory, "cache": cache}


class Transformer(nn.Module):
    """Two groups: an encoder, and a decoder that reads what the encoder gives; a learned bias for both."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(5, 5))
        self.encoder, self.decoder = (nn.ModuleList(Attending() for _ in range(DEPTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.bias + torch.triu(torch.full((5, 5), -1e9), 1)
        memory = self.start(x)
        y = memory.flip(1)
        for layer in self.encoder:
            memory = layer(memory, memory=None, mask=mask)["x"]
        for layer in self.decoder:
            y = layer(y, memory=(memory,), mask=mask)["x"]
        return y


class Collecting(Stack):
    """All results count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.start(x), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return torch.stack(seen).mean(0) + seen[1]


class Skipping(Stack):
    """The second half reads what the first half gave, last first; layers have factors of their own between them."""

    def __init__(self) -> None:
        super().__init__(depth=2 * DEPTH)
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2 * DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.start(x), []
        for i, (block, factor) in enumerate(zip(self.blocks, self.factors, strict=True)):
            x = block(x) * factor
            if i < DEPTH:
                seen.append(x)
            else:
                x = x + seen.pop()
        return x


class Twice(Stack):
    """Every block has two turns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Passing(nn.Module):
    """The first layer makes what the others are given, as T5 does with its bias."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            bias = self.table.sigmoid() if bias is None else bias
            return x + torch.tanh(self.lin(x) * bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(DEPTH + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale * 2, None  # not the derivative: a rule that only PyTorch knows


class WithRule(Block):
    """A derivative of its own, with a number that only the rule reads."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.backward_scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Scaled.apply(x, 0.5)) + _Rule.apply(x, self.backward_scale)  # pyright: ignore


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None


class Checkpointed(Stack):
    """The user's own checkpoints, of the old kind; those of the new kind are in `tests/system/test_hf_usage.py`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x
