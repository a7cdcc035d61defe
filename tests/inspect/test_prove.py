"""Every usual layout against eager torch: what is right holds, what is planted is found, what does not fit is said."""

import functools
from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.cases import CASE, make_mesh
from tests.tables.hf_models import HF_MODELS
from torch_shard._inspect.targets import TINY, loss_with_logits, tiny


def mlp(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4), *more)


def with_outputs(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(batch)
    return (out - batch).square().mean(), {"out": out}


def proofs(model: nn.Module, loss_fn: Any = with_outputs, **options: Any) -> ts.Proofs:
    torch.manual_seed(1)
    return ts.prove(model, loss_fn, torch.randn(8, 4), **options)


def test_a_model_of_the_hub_holds_under_a_layout_that_needs_its_layers() -> None:
    """Its projections are in one matrix; the others, in all layouts, are rows of docs/proof.md."""
    case = next(model for model in HF_MODELS if model.name == "Phi3").cases()[0]
    model, batch = case.model(), case.batches(1)[0]
    with torch.no_grad():
        loss_with_logits(model, batch)  # what transformers leaves on a model at its first call is there
    found = ts.prove(model, loss_with_logits, batch, plans=["tp_sequence"])
    found.raise_if_different()
    assert {row.kind for row in found.rows[0].compared.rows} >= {"loss", "metric", "gradient", "parameter"}


def test_a_tied_language_model_holds_in_stages() -> None:
    case = CASE["gpt"]
    ts.prove(case.model(), case.loss_fn, case.batches(1)[0], plans=["stage_tp"]).raise_if_different()


@pytest.mark.parametrize("name", TINY)
def test_models_that_the_command_knows_run(name: str) -> None:
    model, loss_fn, batch = tiny(name)
    loss, metrics = loss_fn(model, batch)
    assert loss.isfinite()
    assert set(metrics) == {"logits"}


def test_norms_of_batches_hold_and_the_model_stays_as_it_is() -> None:
    model = mlp(nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = proofs(model, plans=["fsdp_tp"])
    found.raise_if_different()
    assert {row.kind for row in found.rows[0].compared.rows} >= {"buffer"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_wrong_update_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = optax.apply_updates
    monkeypatch.setattr(
        optax, "apply_updates", lambda params, updates: wrong(params, jax.tree.map(lambda u: 1.1 * u, updates))
    )
    found = proofs(mlp(), plans=["dp"])
    assert not found.holds
    with pytest.raises(AssertionError, match=r"eager torch:\n  dp on \(batch=8\): .* apart, and"):
        found.raise_if_different()
    assert "apart" in str(found)


def steep(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Nothing but rounding, magnified."""
    out = model(batch)
    return (1e5 * (out.mean() - out.flatten().flip(0).mean()) + out.sum()).square()


def narrow(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


PRECISIONS = {  # the model, the loss, options; in what it was computed, and what may be apart
    "rounding that a model magnifies": (mlp, steep, {}, "float64", 1e-10),
    "the same on the jax device": (lambda: mlp().to("jax"), steep, {}, "float64", 1e-10),
    "float64": (lambda: mlp().double(), with_outputs, {}, "float64", 1e-10),
    "float64, in part float32": (lambda: mlp().double(), narrow, {}, "float64, in part float32", 1e-5),
    "bfloat16": (mlp, with_outputs, {"compute_dtype": torch.bfloat16, "steps": 1}, "bfloat16", 3e-2),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision_has_its_tolerance(name: str) -> None:
    build, loss_fn, options, dtype, tolerance = PRECISIONS[name]
    model = build()
    torch.manual_seed(1)
    batch = torch.randn(8, 4, dtype=torch.float64 if model[0].weight.dtype == torch.float64 else torch.float32)
    (row,) = ts.prove(model, loss_fn, batch, plans=["fsdp"], **options).rows
    assert row.holds
    assert (row.dtype, row.compared.tolerance) == (dtype, tolerance)


class Blocks(nn.Module):
    """Layers that may be stages."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Sequential(mlp(), *more) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def between_rows(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).var(0).log().mean()


@pytest.mark.parametrize(("more", "sizes"), [((nn.Dropout(0.5),), [2]), ((), [4, 2])])
def test_the_reference_has_the_rows_that_microbatches_of_a_layout_have(more: Any, sizes: list[int]) -> None:
    torch.manual_seed(1)
    meshes = [ts.make_mesh(batch=size, stage=2, other=4 // size) for size in sizes]
    plan = {"stages": lambda model, mesh: ts.plans.pipeline(ts.plans.replicated(model, mesh))}
    found = ts.prove(Blocks(*more), between_rows, torch.randn(16, 4), plans=plan, meshes=meshes, steps=1)
    found.raise_if_different()


def test_dropout_is_compared_with_one_device() -> None:
    found = proofs(mlp(nn.Dropout(0.5)).train(), plans=["fsdp_tp"])
    found.raise_if_different()
    assert found.reference == "one device"


def test_plans_and_optimizers_of_the_users_own() -> None:
    plan = ts.ShardingPlan({"0.weight": P("model", None)}, default=P())
    sgd = {"optimizer": optax.sgd(0.1), "torch_optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    meshes = [make_mesh((4, 2)), make_mesh((2, 4))]
    found = proofs(mlp(), plans={"mine": plan, "recipe": ts.plans.fsdp}, meshes=meshes, **sgd)
    found.raise_if_different()
    assert [(row.plan, row.mesh) for row in found.rows] == [
        (plan, mesh) for mesh in ("(batch=4, model=2)", "(batch=2, model=4)") for plan in ("mine", "recipe")
    ]


def test_what_does_not_fit_says_why_and_is_no_difference() -> None:
    found = proofs(mlp(), plans=None, steps=1)
    assert found.holds
    refused = {row.plan: row.refused for row in found.rows if row.refused}
    assert refused["expert"].startswith("plans.expert: no entry of Sequential holds several experts")
    assert refused["tp_sequence"].startswith("plans.fsdp_tp: sequence=True, and Sequential has no ModuleList")
    assert "does not fit: plans.expert" in str(found)


def test_what_was_asked_for_and_does_not_fit_fails() -> None:
    found = proofs(mlp(), plans=["dp", "expert"])
    with pytest.raises(AssertionError, match=r"expert on \(batch=2, model=4\): does not fit: plans.expert: no entry"):
        found.raise_if_different()


def test_a_batch_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="make_train_step: the batch cannot be split"):
        ts.prove(mlp(), with_outputs, torch.ones(7, 4))
