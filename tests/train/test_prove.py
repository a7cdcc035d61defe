"""A proof of a step from its own state and batch: eager torch beside it, by the same random numbers."""

import logging
import pathlib
from typing import Any

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import anew, step_of
from tests.tables.cases import BATCH, CASE, make_step, squared_error


class Drops(nn.Module):
    """Random numbers of several kinds, some drawn again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None] + 0.1 * torch.randn(BATCH, 3, 8)
        for layer in self.layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False)
        keep = torch.randint(0, 3, (BATCH, 1, 1))
        return self.head(F.dropout(h.gather(1, keep.expand(-1, -1, 8))[:, 0], 0.2))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 8), torch.randn(BATCH, 4)


def test_random_numbers_are_drawn_alike() -> None:
    torch.manual_seed(0)
    step = step_of(Drops(), squared_error, optax.adamw(1e-3))
    state, _ = step(step.init(), batch())
    found = step.prove(state, batch())
    assert found.reference == "eager torch, which drew the random numbers of the step"
    assert {row.kind for row in found.rows} == {"loss", "gradient", "update"}
    found.raise_if_different()
    _, metrics = step(state, batch())  # it was only read
    assert float(metrics["loss"]) > 0


def test_what_is_drawn_in_place_is_drawn_alike() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        cut = nn.init.trunc_normal_(torch.empty(4), std=0.5, a=-0.4, b=0.4)
        counts = torch.full((4,), 2**40).random_(5)
        return (F.rrelu(model(x), training=True) + cut + counts).square().mean()

    step = step_of(nn.Linear(8, 4), loss_fn)
    step.prove(step.init(), batch()[0]).raise_if_different()


class Attends(nn.Linear):
    """Attention by torch's own function."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        q, k, v = super().forward(input).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
        return input + F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2).flatten(2)


def test_attention_beside_random_numbers() -> None:
    torch.manual_seed(0)

    def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:  # as masked autoencoders take patches
        before = torch.rand(BATCH, 6).argsort(1)[:, :3, None].expand(-1, -1, 8)
        out = model(x.gather(1, before))
        return (out + torch.randn_like(out)).square().mean()

    step = step_of(nn.Sequential(Attends(8, 24), nn.Linear(8, 8), Attends(8, 24)), masked)
    found = step.prove(step.init(), torch.randn(BATCH, 6, 8))
    assert found.reference == "eager torch, which drew the random numbers of the step"
    found.raise_if_different()


def test_buffers_and_metrics_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return F.mse_loss(out, batch[1]), {"norm": out.norm(), "rows": out.sum(1)}

    plan = ts.ShardingPlan({"0.weight": P("model"), "3.weight": P(None, "model")}, default=P())
    step = step_of(model, loss_fn, optax.adamw(1e-3), mesh=(2, 2), plan=plan, accumulate_steps=2)
    state, _ = step(step.init(), batch())
    found = step.prove(state, batch())
    found.raise_if_different()
    assert {"metric", "buffer"} <= {row.kind for row in found.rows}


def test_a_microbatch_may_be_viewed_as_the_step_has_it() -> None:
    """With one row of it on each shard, the rows of a microbatch are not next to each other in the batch."""
    viewed = lambda model, x: model(x.view(-1, 4)).square().mean()  # noqa: E731
    step = step_of(nn.Linear(4, 1), viewed, mesh=(4, 1), accumulate_steps=2)
    step.prove(step.init(), torch.randn(8, 3, 4)).raise_if_different()


def test_a_difference_is_named() -> None:
    """Of a lowering that is wrong, which nobody would see in the loss."""
    case = CASE["mlp"]
    step = make_step(case)
    model = step.model

    def wrong(grad: torch.Tensor) -> torch.Tensor:
        return grad * (1.001 if torch.compiler.is_compiling() or type(grad) is not torch.Tensor else 1.0)

    next(model.parameters()).register_hook(wrong)
    with pytest.raises(
        AssertionError, match=r"of \d+ values differ from eager torch by more than 1e-04.*\n  gradient "
    ):
        step.prove(step.init(), case.batches(1)[0]).raise_if_different()


def test_what_float32_cannot_do_twice_alike_is_told_apart() -> None:
    """A batch norm over two rows that hardly differ magnifies rounding by thousands."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, eps=1e-12), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(1, 8).expand(BATCH, 8) + 1e-5 * torch.randn(BATCH, 8)
    step = step_of(model, squared_error, optax.sgd(0.1, momentum=0.9), moment_dtype=torch.bfloat16)
    found = step.prove(step.init(), (x, torch.randn(BATCH, 4)))
    assert any(max(row.mesh, row.one_device or 0) > found.tolerance for row in found.rows)
    found.raise_if_different()


def test_an_optimizer_of_torch_and_a_model_in_bfloat16() -> None:
    """Which numpy has not."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    step = step_of(model, squared_error, torch.optim.AdamW(model.parameters(), 0.01))
    found = step.prove(step.init(), (torch.randn(BATCH, 8).bfloat16(), torch.randn(BATCH, 4).bfloat16()))
    assert {row.kind for row in found.rows} == {"loss", "gradient", "update"}
    found.raise_if_different()


def test_fit_proves_its_first_steps_and_saves_before_one_that_differs(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASE["mlp"]
    step, batches = make_step(case), case.batches(4)
    with caplog.at_level(logging.INFO, logger="torch_shard"):
        state = ts.fit(step, step.init(), batches, steps=3, prove_steps=2, progress=False)
    assert [r.getMessage().split(":")[1] for r in caplog.records if "is that of" in r.getMessage()] == [
        " step 1 is that of eager torch",
        " step 2 is that of eager torch",
    ]
    assert step.num_compiles == 1
    unproved = ts.fit(step, anew(step, case.model()).init(), batches, steps=3, progress=False)
    for name, value in unproved.params.items():
        np.testing.assert_array_equal(value, state.params[name])
    wrong = make_step(case)
    next(wrong.model.parameters()).register_hook(lambda grad: grad * (1 + (type(grad) is not torch.Tensor)))
    with pytest.raises(AssertionError, match=r"  gradient 0\.weight: ") as error:
        ts.fit(
            wrong, wrong.init(), batches, steps=3, prove_steps=1, checkpointer=ts.Checkpointer(tmp_path), progress=False
        )
    assert "after 0 of 3 batches" in "".join(error.value.__notes__)
