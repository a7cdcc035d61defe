"""One table of models for all tests that compare with eager torch: each with its batches, its loss and its plan."""

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import Any

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

BATCH = 8  # divides over every batch axis of MESHES
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]


def chosen(values: Iterable[Any], keep: Container[Any]) -> list[Any]:
    """Parameters for a test: those to keep, and the others, each much like one of these, with `-m slow`."""
    return [pytest.param(value, id=str(value), marks=[] if value in keep else pytest.mark.slow) for value in values]


WHOLE = ts.ShardingPlan({}, default=P())  # every device holds all


def make_mesh(sizes: tuple[int, int]) -> Any:
    return ts.make_mesh(batch=sizes[0], model=sizes[1])


def make_step(case: Any, sizes: tuple[int, int] = (4, 2), optimizer: Any = None, model: nn.Module | None = None) -> Any:
    optimizer = optimizer or optax.adam(1e-2)
    return ts.make_train_step(model or case.model(), case.loss_fn, optimizer, mesh=make_mesh(sizes), plan=case.plan)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    rules: dict[str, P]
    loss_fn: Callable[..., torch.Tensor] = squared_error
    train: bool = True
    rtol: float = 2e-5  # float32 sums of some hundred terms in another order

    def __str__(self) -> str:
        return self.name

    @property
    def plan(self) -> ts.ShardingPlan:
        return ts.ShardingPlan(self.rules, default=P())

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().train(self.train)

    def batches(self, num: int, seed: int = 1) -> list[Any]:
        torch.manual_seed(seed)
        return [self.batch() for _ in range(num)]


def regression(*shape: int, out: int) -> Callable[[], Any]:
    return lambda: (torch.randn(BATCH, *shape), torch.randn(BATCH, out))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (f(x_BTC).view(B, T, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=8) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens_BT) + self.places(torch.arange(tokens_BT.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


GPT_RULES = {
    "blocks.*.attention.q.weight": P("model"),
    "blocks.*.attention.q.bias": P("model"),
    "blocks.*.attention.k.weight": P("model"),
    "blocks.*.attention.k.bias": P("model"),
    "blocks.*.attention.v.weight": P("model"),
    "blocks.*.attention.v.bias": P("model"),
    "blocks.*.attention.o.weight": P(None, "model"),
    "blocks.*.up.weight": P("model"),
    "blocks.*.up.bias": P("model"),
    "blocks.*.down.weight": P(None, "model"),
}


def next_token() -> Any:
    tokens = torch.randint(0, 32, (BATCH, 9))
    return tokens[:, :-1], tokens[:, 1:]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))


RESNET_RULES = {"*.conv1.weight": P("model"), "*.conv2.weight": P(None, "model"), "8.weight": P("model")}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], num_layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.rnn = kind(8, 8, num_layers=num_layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(16 if bidirectional else 8, 4)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x_BTC)[0][:, -1])


RNN_RULES = {"rnn.*": P("model")}


class Tied(nn.Module):
    """One weight under three names, used straight and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight, self.again.bias = self.encode.weight, self.encode.bias
        self.extra = self.encode.weight
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.encode(x)))) @ self.extra)


class Frozen(nn.Module):
    """Frozen parameters, one of them in the middle, and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.layers[2].requires_grad_(False)
        self.layers[4].bias.requires_grad_(False)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Buffers(nn.Module):
    """A non-persistent buffer, one written in place, one reassigned, a counter, and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.shift = torch.full((8,), 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count += 1
            self.largest = torch.maximum(self.largest, x.max())
        return self.layer((x - self.mean + self.shift) * self.scale)


class Cuts(nn.Module):
    """A region without gradients, detach, and .data: each must cut the gradient and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.a(x)
        return self.out(self.a(x) * target + self.b(x).detach() * self.c(x) + self.c(x).data)[:, :4]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(x))


class Writes(nn.Module):
    """In-place writes through views: chained views, transposes, diagonals, slices, reshapes, narrows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).clone()
        h.view(-1, 4, 4).diagonal(dim1=1, dim2=2).mul_(2)
        h.t()[0].add_(1)
        h[:, 2:5] = torch.sin(h[:, 2:5].clone())
        h.reshape(-1).view(BATCH, 16)[:, 7] *= h[:, 8].clone()
        left, right = h.narrow(1, 0, 8), h.narrow(1, 8, 8)  # chunk's outputs may not be written to
        left += right.detach()
        right.flatten().zero_()  # a copy or a view, as torch decides
        h.unsqueeze(0).squeeze(0).narrow(1, 12, 2).copy_(h[:, :2].clone())
        return self.b(h)


CASES = [
    Case(
        "mlp", mlp, regression(12, out=4), {"0.weight": P("model"), "0.bias": P("model"), "2.weight": P(None, "model")}
    ),
    Case("gpt", GPT, next_token, GPT_RULES, loss_fn=cross_entropy, rtol=1e-4),
    Case("resnet_train", resnet, regression(3, 16, 16, out=8), RESNET_RULES, rtol=2e-4),  # batch norm divides by std
    Case("resnet_eval", resnet, regression(3, 16, 16, out=8), RESNET_RULES, train=False, rtol=1e-4),
    Case("lstm", lambda: Recurrent(nn.LSTM, 2, False), regression(4, 8, out=4), RNN_RULES),
    Case("gru_bidirectional", lambda: Recurrent(nn.GRU, 1, True), regression(4, 8, out=4), RNN_RULES),
    Case("tied", Tied, regression(8, out=4), {"encode.weight": P("model", None)}),
    Case("frozen", Frozen, regression(8, out=4), {"layers.0.weight": P("model"), "layers.2.weight": P(None, "model")}),
    Case("buffers", Buffers, regression(8, out=4), {"mean": P("model")}),
    Case("cuts", Cuts, regression(8, out=4), {"*.weight": P("model")}),
    Case("writes", Writes, regression(8, out=4), {"a.weight": P("model")}),
]
CASE = {case.name: case for case in CASES}
