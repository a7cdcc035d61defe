"""Tokens that go to their experts and come back; validation/reports/test_errors_of_others.py has layouts and routes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.lowering.test_experts import EXPERTS, WIDTH, make_experts
from tests.lowering.test_llama4_experts import make_mixture
from tests.oracles.steps import step_of
from tests.tables.hf_models import HF_MODELS
from torch_shard._lowering.ops import expert_dispatch

TOKENS = 32


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a few bytes would be gathered."""
    monkeypatch.setattr(expert_dispatch.Exchange, "moves_tokens", lambda *_: True)


def loss_fn(experts: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Any:
    *given, wanted = batch
    out = experts(*given)
    return (out * wanted).sum(), {"out": out}


def mixtral() -> tuple[torch.nn.Module, Any, Any]:
    """With its auxiliary loss, so that its router has two gradients."""
    model = next(model for model in HF_MODELS if model.name == "Mixtral")
    case = dataclasses.replace(model, fields={**model.fields, "num_hidden_layers": 1}).cases()[0]
    return case.model(), case.loss_fn, case.batches(1)[0]


def llama4() -> tuple[torch.nn.Module, Any, Any]:
    """The mixture of experts of one layer."""
    return make_mixture(2), lambda mixture, x: mixture(x)[0].square().mean(), torch.randn(4, TOKENS, WIDTH)


@pytest.mark.parametrize("build", [mixtral, llama4])
def test_models_of_the_hub_with_experts_over_both_axes(build: Any) -> None:
    model, loss_fn, batch = build()
    mesh = ts.make_mesh(batch=2, model=2)
    step = step_of(model, loss_fn, mesh=mesh, plan=ts.plans.expert(model, mesh, ep=("batch", "model")))
    step.prove(step.init(), batch).raise_if_different()
    assert "tokens are sent to experts over batch=2 and back" in step.report()


def test_the_report_says_where_experts_are_not_known() -> None:
    experts = make_experts(hidden_act="relu")
    plan = ts.ShardingPlan({"*": P("batch")}, default=P())
    step = step_of(experts, loss_fn, mesh=ts.make_mesh(batch=4), plan=plan)
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(TOKENS, 2)
    step.lower(step.structs, (x, torch.randint(0, EXPERTS, (TOKENS, 2)), weights, x))
    assert "Experts over batch are computed as the model writes them: tokens are sent to gated" in step.report()


def test_what_nobody_has_written_is_not_a_number() -> None:
    """So that these tests see who reads it: the ragged all-to-all of accelerators leaves anything there."""
    assert np.isnan(expert_dispatch._unwritten((2,), np.dtype(np.float32))).all()
    assert (np.asarray(expert_dispatch._unwritten((2,), np.dtype(np.int32))) < 0).all()


def test_bytes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens go to large experts; small experts come to many tokens."""
    monkeypatch.undo()
    experts = make_experts()
    plan = ts.ShardingPlan({"*": P("batch")}, default=P())
    step = step_of(experts, loss_fn, mesh=ts.make_mesh(batch=4), plan=plan)

    def moves(num_tokens: int) -> bool:
        meta = {"device": "meta"}
        x, weights = torch.empty(num_tokens, WIDTH, **meta), torch.empty(num_tokens, 2, **meta)
        batch = x, torch.empty(num_tokens, 2, dtype=torch.int64, **meta), weights, x
        return "all_to_all" in step.lower(step.structs, batch).as_text()

    assert moves(8)
    assert "experts over batch=4 and back" in step.report()
    assert not moves(4096)
    assert "experts over batch=4 are gathered" in step.report()
