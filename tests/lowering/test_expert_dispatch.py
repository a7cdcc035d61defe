"""Tokens that go to their experts and come back: against eager torch, with NaN where nobody writes."""

import functools
from typing import Any

import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.lowering.test_experts import EXPERTS, WIDTH, make_clamped, make_experts
from tests.tables.hf_models import HF_MODELS
from torch_shard._lowering.ops import expert_dispatch
from validation.proofs.rows import TABLE

TOKENS = 32
MORE = ("Ernie4_5_Moe", "GraniteMoe")
LAYOUTS: dict[str, tuple[dict[str, int], P]] = {
    "one axis": ({"batch": 4}, P("batch")),
    "two experts each": ({"batch": 2, "model": 2}, P("batch")),  # a token with both goes there once
    "two axes": ({"batch": 2, "model": 2}, P(("batch", "model"))),
    "the other way": ({"batch": 2, "model": 2}, P(("model", "batch"))),
    "the first beside": ({"model": 2, "batch": 4}, P("batch")),
}
ROUTES = {
    "spread": lambda: torch.rand(TOKENS, EXPERTS).topk(2).indices,
    "all to one": lambda: torch.full((TOKENS, 1), 2),
    "some to none": lambda: torch.rand(TOKENS, EXPERTS - 1).topk(3).indices,
    "each to all": lambda: torch.arange(EXPERTS).expand(TOKENS, -1).clone(),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a few bytes would be gathered."""
    monkeypatch.setattr(expert_dispatch.Exchange, "moves_tokens", lambda *_: True)


def loss_fn(experts: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Any:
    *given, wanted = batch
    out = experts(*given)
    return (out * wanted).sum(), {"out": out}


@pytest.mark.parametrize(
    ("layout", "route"),
    [
        *((layout, "spread") for layout in LAYOUTS),
        *(("two experts each", route) for route in ROUTES if route != "spread"),
    ],
)
def test_value_and_gradients_equal_eager_torch(layout: str, route: str) -> None:
    """With biases where tokens are spread. Tokens and weights get their gradients by layers in front.

    Routes are values of one program: all of them on two axes are in tests/system/test_errors_of_others.py.
    """
    experts = make_clamped() if route == "spread" else make_experts()
    model = _Layer(experts)
    sizes, spec = LAYOUTS[layout]
    ids = ROUTES[route]()
    batch = torch.randn(TOKENS, WIDTH), ids, torch.rand(ids.shape), torch.randn(TOKENS, WIDTH)
    plan = ts.ShardingPlan({"experts.*": spec}, default=P())
    found = ts.prove(
        model,
        loss_fn,
        batch,
        plans={"dispatch": plan},
        meshes=[ts.make_mesh(**sizes)],
        steps=1,
        optimizer=optax.sgd(0.1),
        torch_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    found.raise_if_different()
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=ts.make_mesh(**sizes), plan=plan)
    text = step.lower(step.structs, batch).as_text()
    assert "all_to_all" in text


class _Layer(torch.nn.Module):
    """Experts behind products that their tokens and weights have gradients for."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts, self.first = experts, torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(self.first(x), ids, weights * self.scale)


OF_THE_HUB = ["Mixtral", "Llama4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("DeepseekV3", *MORE))]


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_models_of_the_hub_with_experts_over_both_axes(name: str) -> None:
    """Mixtral with its auxiliary loss, so that its router has two gradients; DeepSeek with shared experts."""
    case = next((model.cases()[0] for model in HF_MODELS if model.name == name), None)
    model, loss_fn, batch = (case.model(), case.loss_fn, case.batches(1)[0]) if case else TABLE[name].build()
    plan = functools.partial(ts.plans.expert, ep=("batch", "model"))
    mesh = ts.make_mesh(batch=2, model=2)
    ts.prove(model, loss_fn, batch, plans={"experts": plan}, meshes=mesh).raise_if_different()
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=mesh, plan=plan(model, mesh))
    step.lower(step.structs, batch)
    assert "tokens are sent to experts over batch=2 and back" in step.report()


def test_the_report_says_where_experts_are_not_known() -> None:
    experts = make_experts(hidden_act="relu")
    plan = ts.ShardingPlan({"*": P("batch")}, default=P())
    step = ts.make_train_step(experts, loss_fn, optax.sgd(0.1), mesh=ts.make_mesh(batch=4), plan=plan)
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(TOKENS, 2)
    step.lower(step.structs, (x, ROUTES["spread"](), weights, x))
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
    step = ts.make_train_step(experts, loss_fn, optax.sgd(0.1), mesh=ts.make_mesh(batch=4), plan=plan)

    def moves(num_tokens: int) -> bool:
        meta = {"device": "meta"}
        x, weights = torch.empty(num_tokens, WIDTH, **meta), torch.empty(num_tokens, 2, **meta)
        batch = x, torch.empty(num_tokens, 2, dtype=torch.int64, **meta), weights, x
        return "all_to_all" in step.lower(step.structs, batch).as_text()

    assert moves(8)
    assert "experts over batch=4 and back" in step.report()
    assert not moves(4096)
    assert "experts over batch=4 are gathered" in step.report()
