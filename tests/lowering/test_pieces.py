"""A fused projection in pieces, cut as models do: eager torch's numbers, and no move between devices for a cut."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of

B, T, D, H = 8, 4, 16, 4


def _attend(q, k, v):
    q, k, v = (part.reshape(B, T, H, -1).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _chunk(x, w, b):
    return _attend(*F.linear(x, w, b).chunk(3, -1))


def _slices(x, w, b):
    y = F.linear(x, w) + b
    return _attend(y[..., :D], y[..., D : 2 * D].tanh(), y[..., 2 * D :])


def _unbind(x, w, b):
    q, k, v = F.linear(x, w, b).view(B, T, 3, H, -1).unbind(2)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _permuted(x, w, b):
    qkv = F.linear(x, w, b).reshape(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])


def _heads(x, w, b):
    y = F.linear(x, w, b).view(B, T, 3 * H, -1).transpose(1, 2)
    q, k, v = y.chunk(3, 1)
    return F.scaled_dot_product_attention(q, k, v)


def _conv1d(x, w, b):
    y = torch.addmm(b, x.view(-1, D), w).view(B, T, 3 * D)
    return _attend(*y.split(D, dim=2))


def _gated(x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def _experts(x, w, b):
    gate, up = torch.bmm(x, w.transpose(1, 2)).chunk(2, -1)
    return F.gelu(gate) * (up + b.view(2, -1)[0])


# The function, the weight's shape, its pieces and their dim from the end.
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], int, int]] = {
    "chunk": (_chunk, (3 * D, D), 3, -2),
    "slices": (_slices, (3 * D, D), 3, -2),
    "unbind": (_unbind, (3 * D, D), 3, -2),
    "permuted": (_permuted, (3 * D, D), 3, -2),
    "heads": (_heads, (3 * D, D), 3, -2),
    "conv1d": (_conv1d, (D, 3 * D), 3, -1),
    "gated": (_gated, (2 * D, D), 2, -2),
    "experts": (_experts, (B, 2 * D, D), 2, -2),
}


class Fused(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.cut, shape, num, _ = CASES[name]
        self.weight, self.bias = (nn.Parameter(0.3 * torch.randn(size)) for size in (shape, num * D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x, self.weight, self.bias)


@pytest.mark.parametrize("name", CASES)
def test_pieces_stay_apart_and_give_torchs_numbers(name: str) -> None:
    torch.manual_seed(0)
    _, shape, num, dim = CASES[name]
    along = P(*("model" if i == len(shape) + dim else None for i in range(len(shape))))
    stored = {"weight": ts.Pieces(num, dim=dim), "bias": ts.Pieces(num, dim=0)}
    plan = ts.ShardingPlan({"weight": along, "bias": P("model")}, stored=stored)
    batch_spec = P() if name == "experts" else P("batch")
    step = step_of(Fused(name), lambda model, x: model(x).tanh().square().mean(), plan=plan, batch_spec=batch_spec)
    step.prove(step.init(), torch.randn(B, T, D)).raise_if_different()
    assert step.programs[0].collectives.keys() <= {"all-reduce"}
