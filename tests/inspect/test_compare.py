"""The user's own proof: it holds for what is right, and finds what is planted."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import rich
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.processes import run_processes
from tests.tables.cases import CASE, make_mesh, squared_error
from torch_shard._train.comparison import Comparison, Difference, _apart

MESH = {"mesh": make_mesh((4, 2))}

PLAN = ts.ShardingPlan({"0.weight": P("model")}, default=P())


def compare(model: nn.Module, loss_fn: Any = squared_error, **options: Any) -> Comparison:
    torch.manual_seed(1)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return ts.compare_with_torch(model, loss_fn, batch, plan=PLAN, **MESH, **options)


def linear(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), *more)


@pytest.mark.parametrize("name", ["tied", "buffers"])
def test_what_is_right_holds(name: str) -> None:
    c = CASE[name]
    model = c.model()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = ts.compare_with_torch(model, c.loss_fn, c.batches(1)[0], plan=c.plan, steps=2, **MESH)
    found.raise_if_different(rtol=1e-3)  # two steps of float32
    names = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert {row.name for row in found.rows if row.kind in ("parameter", "buffer")} == names
    assert [row.worst for row in found.rows] == sorted((row.worst for row in found.rows), reverse=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        optax, "apply_updates", lambda params, updates: {n: p + 1.1 * updates[n] for n, p in params.items()}
    )
    found = compare(linear())
    with pytest.raises(AssertionError, match=r"2 of 5 values differ from eager torch.*\n.*parameter 0.(weight|bias)"):
        found.raise_if_different(rtol=1e-5)


class Device(nn.Module):
    """Gives another value in a compiled program than in eager torch, through JAX."""

    def __init__(self, factor: Callable[[Any], float] = lambda dtype: 1.5) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if type(x) is torch.Tensor else ts.call_jax(lambda a: a * self.factor(a.dtype), x)


def test_a_difference_is_found_printed_and_raised() -> None:
    found = compare(linear(Device()))
    worst = found.rows[0]
    assert worst.mesh > 0.1
    assert "loss" in str(found)
    assert "0.weight" in str(found)
    with pytest.raises(AssertionError, match=r"gradient 0.weight: \d.* on one device, \d.* on the mesh"):
        found.raise_if_different()
    rich.print(found)


def test_what_is_finite_on_one_side_alone_is_no_rounding() -> None:
    found = compare(linear(Device(lambda dtype: 1.0 if dtype == np.float64 else math.nan)))
    with pytest.raises(AssertionError, match="loss loss: inf on one device, inf on the mesh"):
        found.raise_if_different()
    assert all(Difference("loss", "loss", 1, None, math.inf, wide).worst == math.inf for wide in (0.0, 0.5, math.inf))


def test_random_losses_compare_one_device_with_the_mesh() -> None:
    found = compare(linear(nn.Dropout(0.5)))
    assert found.reference == "one device"
    assert all(row.one_device is None for row in found.rows)
    found.raise_if_different()
    assert compare(linear(nn.Dropout(0.5)).eval()).reference == "eager torch"


def test_optimisers_come_in_pairs_and_metrics_count() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = squared_error(model, batch)
        return loss, {"root": loss.sqrt(), "parts": {"mean": model(batch[0]).mean()}}

    adam = {"optimizer": optax.adam(0.1), "torch_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}
    found = compare(linear(), loss_fn, steps=3, **adam)
    found.raise_if_different()
    assert {row.name for row in found.rows if row.kind == "metric"} == {"root", "parts.mean"}
    assert found.losses[0] > found.losses[-1]
    wrong = compare(linear(), steps=3, **adam | {"optimizer": optax.adam(0.101)})
    with pytest.raises(AssertionError, match=r"parameter 0\."):
        wrong.raise_if_different()


def test_compute_dtype_is_compared_in_the_same_mode() -> None:
    found = compare(linear(nn.LayerNorm(2)), compute_dtype=torch.bfloat16)
    found.raise_if_different()
    assert found.tolerance > 1e-3


def test_kinds_of_infinities_differ() -> None:
    key = ("loss", "loss")
    values = [math.nan, math.inf, -math.inf, 1.0]
    for wanted in values:
        for found in values:
            same = wanted == found or (math.isnan(wanted) and math.isnan(found))
            assert _apart(key, {key: np.array(wanted)}, {key: np.array(found)}) == (0 if same else math.inf)
    assert _apart(key, {}, {key: np.array(1.0)}) == math.inf


def test_rounding_of_what_is_zero_is_measured_by_the_others() -> None:
    key, other = ("gradient", "bias"), ("gradient", "weight")
    wanted = {key: np.array([1e-9]), other: np.array([1.0])}
    assert _apart(key, wanted, {key: np.array([-1e-9])}) < 1e-6


def test_hooks_on_parameters_act_on_both_sides() -> None:
    model = linear()
    model[0].weight.register_hook(lambda grad: 3 * grad)
    found = compare(model)
    found.raise_if_different()
    plain = {row.name: row.size for row in compare(linear()).rows if row.kind == "gradient"}
    hooked = {row.name: row.size for row in found.rows if row.kind == "gradient"}
    assert hooked == {"0.weight": pytest.approx(3 * plain["0.weight"]), "0.bias": plain["0.bias"]}


def test_every_process_compares_and_proves() -> None:
    run_processes(
        """
        import optax
        from jax.sharding import PartitionSpec as P
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        mesh, batch = ts.make_mesh(batch=2, model=2), torch.randn(8, 8)
        plan = ts.ShardingPlan({"0.weight": P("model")}, default=P())
        def loss_fn(model, batch):
            out = model(batch)
            return out.square().mean(), {"out": out}
        found = ts.compare_with_torch(model.eval(), loss_fn, batch, mesh=mesh, plan=plan, steps=2)
        assert found.reference == "eager torch"
        found.raise_if_different()
        step = ts.make_train_step(model.train(), loss_fn, optax.adamw(1e-3), mesh=mesh, plan=plan)
        step.prove(step.init(seed=0), batch).raise_if_different()
        """,
        2,
    )


def test_rounding_that_the_model_magnifies_is_told_apart() -> None:
    model = linear(nn.BatchNorm1d(2, eps=1e-12), nn.Tanh())
    x = torch.randn(1, 4).expand(8, 4) + 1e-5 * torch.randn(8, 4)
    found = ts.compare_with_torch(model, squared_error, (x, torch.randn(8, 2)), plan=PLAN, **MESH)
    assert any(row.mesh > found.tolerance for row in found.rows)
    found.raise_if_different()
