"""Warnings of fused projections; the oracle is what XLA compiles for layers of their own, and for the fused one."""

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from tests.tables.cases import BATCH, make_mesh
from tests.tables.layers import DEPTH, Stack

WIDTH, HEADS = 8, 4  # WIDTH is that of `Stack`
COLUMNS = {"**.fused.**": P("model"), "**.o.weight": P(None, "model")}


class Fused(nn.Module):
    """Attention with one projection for q, k and v."""

    def __init__(self, cut: Callable[[torch.Tensor], Any], rows: int = 3 * WIDTH) -> None:
        super().__init__()
        self.fused, self.o, self.cut = nn.Linear(WIDTH, rows), nn.Linear(WIDTH, WIDTH), cut

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (t.reshape(B, T, -1, C // HEADS).transpose(1, 2) for t in self.cut(self.fused(x_BTC)))
        heads = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape != k.shape)
        return x_BTC + self.o(heads.transpose(1, 2).reshape(B, T, C))


class Apart(nn.ModuleList):
    """Layers in place of a fused one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.Linear(WIDTH, size) for size in sizes)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self]


def apart(*sizes: int) -> nn.Module:
    """`Fused` with layers of their own."""
    model = Fused(lambda pieces: pieces)
    model.fused = Apart(*sizes)
    return model


class Gated(nn.Module):
    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fused, self.o, self.cut = nn.Linear(WIDTH, 32, bias=False), nn.Linear(16, WIDTH), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o(self.cut(self.fused(x)))


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 32)), nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:-1], 32)


class Multihead(nn.Module):
    """PyTorch's own; where keys are not the queries, it cuts the weight instead of the product."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.attention, self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), cross

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = x.flip(1) if self.cross else x
        return self.attention(x, keys, keys, need_weights=False)[0]


def gate_first(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def gate_in_turn(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def in_thirds(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(-1, (3, HEADS, -1))


def by_heads(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(-1, (HEADS, 3, -1))


def by_groups(y: torch.Tensor) -> Any:
    """Two queries, one key and one value for each of two key-value heads."""
    return y.unflatten(-1, (2, 4, -1)).split([2, 1, 1], -2)


def conv1d() -> nn.Module:
    model = Gated(gate_first)
    model.fused = Conv1D()
    return model


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    rules: Any = dataclasses.field(default_factory=lambda: COLUMNS)
    says: str = ""
    apart: tuple[int, ...] = (WIDTH, WIDTH, WIDTH)

    @property
    def options(self) -> dict[str, Any]:
        return {"mesh": make_mesh((4, 2)), "plan": ts.ShardingPlan(self.rules, default=P())}


THIRDS = (
    "0.fused.weight (24, 8): P('model') splits dim 0 = 24 into shards of 12 (model=2), and the model cuts it into 3 "
    "pieces of 8, 8, 8,"
)
HALVES = "dim 0 = 32 into shards of 16 (model=2), and the model cuts it into 2 pieces of 16, 16,"
MULTIHEAD = {"0.attention.in_proj_*": P("model"), "0.attention.out_proj.weight": P(None, "model")}
SWAPPED = {"0.fused.weight": P(None, "model"), "0.fused.bias": P("model"), "0.o.weight": P(None, "model")}

WARNED = [
    Case("split", lambda: Fused(lambda y: y.split(WIDTH, -1)), says=THIRDS),
    Case("slices", lambda: Fused(lambda y: (y[..., :8], y[..., 8:16], y[..., 16:])), says=THIRDS),
    Case("unbind", lambda: Fused(lambda y: in_thirds(y).unbind(2)), says=THIRDS),
    Case("permute", lambda: Fused(lambda y: in_thirds(y).permute(2, 0, 1, 3, 4)), says=THIRDS),
    Case("grouped", lambda: Fused(lambda y: y.split([8, 4, 4], -1), rows=16), says="3 pieces of 8, 4, 4,"),
    Case("gate first", lambda: Gated(gate_first), says=HALVES),
    Case("glu", lambda: Gated(F.glu), says=HALVES),
    Case("(in, out)", conv1d, SWAPPED, says="(8, 32): P(None, 'model') splits dim 1 = 32 into shards of 16"),
    Case("multihead", lambda: Multihead(False), MULTIHEAD, says="in_proj_weight (24, 8): P('model') splits dim 0"),
    Case("multihead, cross", lambda: Multihead(True), MULTIHEAD, says="2 pieces of 8, 16,"),
    Case("in a loop", lambda: Stack(lambda: Fused(lambda y: y.split(WIDTH, -1))), says="blocks.0.fused.weight (24, 8)"),
]
ALIGNED = [
    Case("separate", lambda: apart(WIDTH, WIDTH, WIDTH)),
    Case("by heads", lambda: Fused(lambda y: by_heads(y).unbind(3))),
    Case("by groups", lambda: Fused(by_groups, rows=16), apart=(8, 4, 4)),
    Case("in turn", lambda: Gated(gate_in_turn)),
    Case("replicated", lambda: Fused(lambda y: y.split(WIDTH, -1)), {}),
    Case("by heads, in a loop", lambda: Stack(lambda: Fused(lambda y: by_heads(y).unbind(3)))),
]


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _compiled(case: Case, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[Any, Any, list[str]]:
    """The step, its lowered program and its warnings."""
    torch.manual_seed(0)
    built = case.build()
    model = built if isinstance(built, Stack) else nn.Sequential(built)
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), **(case.options | options))
    with caplog.at_level(logging.WARNING, logger="torch_shard"):
        lowered = step.lower(step.init(), torch.randn(BATCH, 4, WIDTH))
    return step, lowered, [record.getMessage() for record in caplog.records]


def _moves(lowered: Any) -> collections.Counter[str]:
    """Collectives that move pieces; sums over devices (all-reduce) are due to the plan."""
    found = count_collectives(lowered.compile())
    return collections.Counter(
        {kind: found[kind] for kind in ("all-to-all", "collective-permute", "all-gather") if found[kind]}
    )


@pytest.mark.parametrize("case", WARNED, ids=lambda case: case.name)
def test_pieces_across_shards_are_warned_of_and_cost(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    step, lowered, warnings = _compiled(case, caplog)
    (warning,) = warnings
    assert case.says in warning
    assert warning.removeprefix("make_train_step: ") in step.report().splitlines()
    assert _moves(lowered)


def test_layers_of_their_own_cost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert not _moves(_compiled(ALIGNED[0], caplog)[1])


@pytest.mark.parametrize("case", ALIGNED, ids=lambda case: case.name)
def test_pieces_that_line_up_are_not_warned_of_and_cost_nothing(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    step, lowered, warnings = _compiled(case, caplog)
    assert not warnings
    assert "pieces" not in step.report()
    # XLA gathers keys that are repeated for groups of queries, fused or not.
    separate = dataclasses.replace(case, build=lambda: apart(*case.apart))
    assert _moves(lowered) <= _moves(_compiled(separate, caplog)[1])


def test_input_dim_is_not_warned_of_and_moves_no_pieces(caplog: pytest.LogCaptureFixture) -> None:
    _, lowered, warnings = _compiled(dataclasses.replace(WARNED[0], rules={"0.fused.weight": P(None, "model")}), caplog)
    assert not warnings
    assert set(_moves(lowered)) <= {"all-gather"}  # of the weight: XLA may prefer that to a sum of products


def test_layers_in_a_loop_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, _, (warning,) = _compiled(WARNED[-1], caplog)
    assert f"(24, 8) (and {DEPTH - 1} more like it, up to blocks.{DEPTH - 1}.fused.weight): P('model')" in warning


def test_warning_is_the_same_without_loops(caplog: pytest.LogCaptureFixture) -> None:
    _, _, looped = _compiled(WARNED[-1], caplog)
    caplog.clear()
    _, _, unrolled = _compiled(WARNED[-1], caplog, scan_layers=False)
    assert unrolled == looped


def test_warning_is_the_same_under_autocast(caplog: pytest.LogCaptureFixture) -> None:
    _, _, (warning,) = _compiled(WARNED[0], caplog, compute_dtype=torch.bfloat16)
    assert THIRDS in warning


def test_warning_says_what_it_costs_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    _, _, (warning,) = _compiled(WARNED[0], caplog)
    assert warning.endswith(
        ", of which not every shard holds an equal part. The results are right, but every pass, forward and backward, "
        "moves the pieces between devices (all-to-all, collective-permute or all-gather). Store it in pieces, "
        'ShardingPlan(..., stored={"0.fused.weight": ts.Pieces(3, dim=0)}), and its bias alike. '
        "Give each piece a layer of its own (q, k and v; gate and up), or order the rows so that each shard holds an "
        "equal part of every piece "
        "(whole heads of q, k and v), or split its other dim, P(None, 'model'), for one gather or sum instead."
    )


def test_other_dim_is_not_offered_where_it_does_not_divide(caplog: pytest.LogCaptureFixture) -> None:
    three = {"mesh": ts.make_mesh(batch=2, model=3, devices=jax.devices()[:6])}  # 24 rows, 8 columns
    _, _, (warning,) = _compiled(dataclasses.replace(WARNED[0], rules={"0.fused.weight": P("model")}), caplog, **three)
    assert "24 into shards of 8 (model=3)" in warning
    assert warning.endswith("(whole heads of q, k and v).")


def test_weights_that_are_split_with_the_batch_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Such weights are gathered before they are used."""
    rules = {"0.fused.weight": P("batch")}
    assert not _compiled(dataclasses.replace(WARNED[0], rules=rules), caplog)[2]
    options = {"batch_spec": P(), "plan": ts.ShardingPlan(rules, default=P())}
    assert _compiled(WARNED[0], caplog, **options)[2]


FEW = {
    "crop": lambda y: y[..., :16],  # a padded vocabulary
    "rows": lambda y: y[..., 3:4] - y[..., 7:8].expand(BATCH, 4, 16),  # two answers of a language model
}


@pytest.mark.parametrize("name", FEW)
def test_what_moves_little_is_not_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not _compiled(Case(name, lambda: Gated(FEW[name])), caplog)[2]


def test_rows_are_followed_through_products_with_vectors(caplog: pytest.LogCaptureFixture) -> None:
    def mean_over_time(y: torch.Tensor) -> torch.Tensor:
        return gate_first(y.transpose(1, 2) @ torch.full((4,), 0.25))[:, None]

    _, _, (warning,) = _compiled(Case("mean", lambda: Gated(mean_over_time)), caplog)
    assert HALVES in warning


def test_evaluation_warns_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(WARNED[0].build())
    evaluate = ts.make_eval_step(model, loss_fn, **WARNED[0].options)
    state = ts.make_train_step(model, loss_fn, optax.sgd(0.1), **WARNED[0].options).init()
    with caplog.at_level(logging.WARNING, logger="torch_shard"):
        for _ in range(2):  # once per compilation
            evaluate(state, torch.randn(BATCH, 4, WIDTH))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"make_eval_step: {THIRDS}")
