"""Grouped products against one product per group in eager torch, alone and on a mesh."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.derivatives import assert_equals_torch
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.steps import mean_square
from tests.tables.cases import Case

OFFSETS = [[4, 8, 16], [0, 12, 16], [16, 16, 16], [4, 8, 12]]  # even, an empty group, one for all, some left over
CLOSE = {"rtol": 2e-5, "atol": 5e-5}  # float32 sums of up to 16 terms, and of four gradients


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
def test_value_and_gradients_equal_a_product_per_group(form: str) -> None:
    torch.manual_seed(0)
    shape_x, shape_y, by_group = FORMS[form]
    ends = [torch.tensor(each, dtype=torch.int32) for each in OFFSETS]

    def ours(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [F.grouped_mm(x, y, offs=None if form == "batch" else each) for each in ends]

    def theirs(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [by_group(x, y, each) for each in ends]

    assert_equals_torch(ours, [torch.randn(shape_x), torch.randn(shape_y)], eager=theirs, **CLOSE)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_and_its_wider_result(autocast: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    offs = torch.tensor([4, 8, 16], dtype=torch.int32)

    def grouped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return F.grouped_mm(x, y, offs=offs)

    wanted = rows(x.float(), y.float(), offs)
    out = ts.jax_jit(grouped)(*((x.float(), y.float()) if autocast else (x, y))).cpu()
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=2**-8, atol=2**-8)  # one rounding to bfloat16


class Experts(torch.nn.Module):
    """Each token through one of four expert matrices, its rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.down = torch.nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = x[:, :4].argmax(-1)
        order = expert.argsort(stable=True)
        offs = (expert[:, None] == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        h = F.grouped_mm(torch.tanh(F.grouped_mm(x[order], self.up, offs=offs)), self.down, offs=offs)
        return torch.zeros_like(x).index_copy(0, order, h)


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P(None, None, "model")], ids=str)
def test_sharded_experts_train_as_in_eager_torch(spec: P) -> None:
    case = Case("experts", Experts, lambda: torch.randn(16, 8), {"up": spec, "down": spec}, mean_square)
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))
