"""Grouped products against one product per group in eager torch, alone and on a mesh."""

from collections.abc import Callable

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.derivatives import assert_equals_torch
from tests.tables.cases import sgd_step

OFFSETS = [[4, 8, 16], [0, 12, 16], [16, 16, 16], [4, 8, 12]]  # even, an empty group, one for all, some left over
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of up to 16 terms in another order


def pieces(offs: torch.Tensor) -> list[slice]:
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def rows(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    found = torch.cat([x[piece] @ y[i] for i, piece in enumerate(pieces(offs))])
    return torch.cat([found, x.new_zeros(len(x) - len(found), y.shape[-1])])


def columns(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return rows(y.T, x.mT, offs).T


def summands(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, piece] @ y[piece] for piece in pieces(offs)])


FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "rows": ((16, 8), (3, 8, 4), rows),
    "columns": ((3, 4, 8), (8, 16), columns),
    "summands": ((8, 16), (16, 4), summands),
    "batch": ((3, 4, 8), (3, 8, 4), lambda x, y, offs: x @ y),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ends", OFFSETS, ids=str)
def test_value_and_gradients_equal_a_product_per_group(form: str, ends: list[int]) -> None:
    torch.manual_seed(0)
    shape_x, shape_y, by_group = FORMS[form]
    x, y, offs = torch.randn(shape_x), torch.randn(shape_y), torch.tensor(ends, dtype=torch.int32)
    given = None if form == "batch" else offs

    def ours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, y, offs=given)

    assert_equals_torch(ours, [x, y], eager=lambda x, y: by_group(x, y, offs), **CLOSE)


def test_bfloat16_and_its_wider_result() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    offs = torch.tensor([4, 8, 16], dtype=torch.int32)
    out = ts.jax_jit(lambda x, y: F.grouped_mm(x, y, offs=offs))(x, y).cpu()
    assert out.dtype is torch.bfloat16
    wanted = rows(x.float(), y.float(), offs)
    torch.testing.assert_close(out.float(), wanted, rtol=2**-8, atol=2**-8)  # one rounding to bfloat16


class Experts(torch.nn.Module):
    """Each token through one of four expert matrices, its rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.up = torch.nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.down = torch.nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: torch.Tensor, by_group: Callable[..., torch.Tensor]) -> torch.Tensor:
        gate, expert = (found.squeeze(-1) for found in self.router(x).softmax(-1).topk(1))
        order = expert.argsort(stable=True)
        offs = (expert[:, None] == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        h = by_group(torch.tanh(by_group(x[order], self.up, offs)), self.down, offs)
        return torch.zeros_like(x).index_copy(0, order, h) * gate[:, None]


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P(None, None, "model"), P()], ids=str)
def test_sharded_experts_train_as_in_eager_torch(spec: P) -> None:
    def loss_with(by_group: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda model, batch: model(batch, by_group).square().mean()

    torch.manual_seed(0)
    model, batches = Experts(), [torch.randn(16, 8) for _ in range(2)]
    plan = ts.ShardingPlan({"up": spec, "down": spec}, default=P())
    compiled_loss = loss_with(lambda x, y, offs: F.grouped_mm(x, y, offs=offs))
    step = sgd_step(model, compiled_loss, optax.sgd(0.5), plan=plan)
    state = step.init(seed=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        state, _ = step(state, batch)
        sgd.zero_grad()
        loss_with(rows)(model, batch).backward()
        sgd.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(torch.tensor(np.asarray(state.params[name])), parameter.detach(), **CLOSE)
