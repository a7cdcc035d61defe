"""Operators that add many values in half precision: float32 inside and one rounding at the end, as in torch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_shard as ts

NUM = 4096  # a sum that is rounded each time stops growing at 256 times its addends
Function = Callable[[torch.Tensor], torch.Tensor]
ONE_PLACE = torch.zeros(NUM, dtype=torch.int64)


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, dtype=x.dtype)


# Of operators that are lowered alike, one.
VALUES: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "var": lambda x: x.var(),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0)[-8:],
    "logcumsumexp": lambda x: x.logcumsumexp(0)[-8:],
    "matrix product": lambda x: x[None] @ x[:, None],
    "einsum": lambda x: torch.einsum("i,i->", x, x),
    "convolution": lambda x: F.conv1d(x[None, None], torch.ones_like(x)[None, None]),
    "avg_pool2d": lambda x: F.avg_pool2d(x.view(1, 1, 64, 64), 64),
    "scatter_add": lambda x: zeros(x).scatter_add(0, ONE_PLACE, x),
    "scatter, reduce": lambda x: zeros(x).scatter(0, ONE_PLACE, x, reduce="add"),
    "scatter_reduce, mean": lambda x: zeros(x).scatter_reduce(0, ONE_PLACE, x, "mean"),
    "index_add": lambda x: zeros(x).index_add(0, ONE_PLACE, x),
    "index_reduce": lambda x: zeros(x).index_reduce(0, ONE_PLACE, x, "mean"),
    "put": lambda x: zeros(x).put(ONE_PLACE, x, accumulate=True),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([NUM])),
    "embedding_bag, mean": lambda x: F.embedding_bag(ONE_PLACE[None], x[:2, None], mode="mean"),
    "cdist": lambda x: torch.cdist(x[None], torch.zeros_like(x)[None], p=1.0),
    "pdist": lambda x: F.pdist(torch.stack([x, torch.zeros_like(x)]), p=1.0),
    "layer_norm": lambda x: F.layer_norm(x, (NUM,))[:8],
    "rms_norm": lambda x: F.rms_norm(x, (NUM,))[:8],
    "group_norm": lambda x: F.group_norm(x.view(1, 64, 64), 1)[0, 0, :8],
    "batch_norm": lambda x: F.batch_norm(x[:, None], None, None, training=True)[:8],
    "softmax": lambda x: x.softmax(0)[:8],
    "log_softmax": lambda x: x.log_softmax(0)[:8],
    "cross_entropy": lambda x: F.cross_entropy(x[:, None].expand(NUM, 2) * torch.tensor([1, 0]), ONE_PLACE),
    "nll_loss": lambda x: F.nll_loss(x[:, None], ONE_PLACE, reduction="sum"),
    "weight_norm": lambda x: torch._weight_norm(x[None], torch.ones(1, 1, dtype=x.dtype), 0)[0, :8],
}
GRADIENTS: dict[str, Function] = {
    "repeat": lambda x: x[:2].repeat(NUM),
    "gather": lambda x: x[:2].gather(0, ONE_PLACE),
    "index_select": lambda x: x[:2].index_select(0, ONE_PLACE),
    "take": lambda x: x[:2].take(ONE_PLACE),
    "embedding": lambda x: F.embedding(ONE_PLACE, x[:2, None]),
    "embedding_bag": lambda x: F.embedding_bag(ONE_PLACE[:, None], x[:2, None], mode="mean"),
    "cumsum": lambda x: x.cumsum(0),
    "replicate": lambda x: F.pad(x[None, None, :2], (NUM, 0), mode="replicate"),
    "linear": lambda x: F.interpolate(x[None, None, :2], size=NUM, mode="linear"),
    "grid_sample": lambda x: F.grid_sample(
        x[:4].view(1, 1, 2, 2), torch.zeros(1, 64, 64, 2, dtype=x.dtype), align_corners=True
    ),
    "unfold": lambda x: F.unfold(x[:1].expand(1, 1, 64, 64), 1),
    "a bias": lambda x: F.linear(torch.ones(NUM, 1, dtype=x.dtype), torch.ones(2, 1, dtype=x.dtype), x[:2]),
    "a weight": lambda x: F.linear(torch.ones(NUM, 1, dtype=x.dtype), x[:2, None]),
    "a kernel": lambda x: F.conv1d(torch.ones(1, 1, NUM, dtype=x.dtype), x[:2, None, None], x[:2]),
    "layer_norm": lambda x: F.layer_norm(torch.ones(NUM, 1, dtype=x.dtype) * torch.arange(2), (2,), x[:2], x[:2]),
    "batch_norm": lambda x: F.batch_norm(
        torch.arange(NUM, dtype=x.dtype)[:, None] % 2, None, None, x[:1], x[:1], training=True
    ),
    "prelu": lambda x: F.prelu(-torch.ones(NUM, 1, dtype=x.dtype), x[:1]),
}


def each(table: dict[str, Function]) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    return lambda x: {name: fn(x) for name, fn in table.items()}


def gradient_of(fn: Function) -> Function:
    return lambda x: torch.func.grad(lambda y: fn(y).float().sum())(x)[:8]


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize(
    "table", [VALUES, {name: gradient_of(fn) for name, fn in GRADIENTS.items()}], ids=["values", "gradients"]
)
def test_sums_are_rounded_once(table: dict[str, Function]) -> None:
    x = (torch.rand(NUM, generator=torch.Generator().manual_seed(0)) / 2 + 0.5).bfloat16()
    found, wanted = ts.jax_jit(each(table))(x), each(table)(x.double())
    apart = {name: _apart(np.asarray(found[name].jax()), value.numpy()) for name, value in wanted.items()}
    # What comes before and behind a sum is rounded too: log, square, a division.
    assert {name: error for name, error in apart.items() if not error <= 4 * torch.finfo(x.dtype).eps} == {}


def test_the_backward_pass_of_group_norm_has_the_mean_as_torch_has_it() -> None:
    x = (torch.rand(NUM, generator=torch.Generator().manual_seed(1)) / 50 + 0.99).bfloat16()
    gradient = torch.func.grad(lambda x: F.group_norm(x.view(1, 64, 64), 1).abs().float().sum())
    found, wanted = ts.jax_jit(gradient)(x).cpu().float(), gradient(x).float()
    assert _apart(found.numpy(), wanted.numpy()) < 0.05  # 1 where the mean is rounded


def _apart(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max())
