"""Fused projections that a step keeps in pieces; the oracles are eager torch, and a step that keeps torch's form."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import check_goes_on, check_same, run_steps, step_of

D, HIDDEN, HEADS, LAYERS = 8, 16, 2, 3
RULES = {
    "*.*.qkv.*": P("model"),
    "*.*.o.weight": P(None, "model"),
    "*.*.gate_up": P(None, "model"),
    "*.*.down.weight": P(None, "model"),
}
STORED = {
    "*.*.qkv.weight": ts.Pieces(3, dim=0),
    "*.*.qkv.bias": ts.Pieces(3, dim=0),
    "*.*.gate_up": ts.Pieces(2, dim=-1),
}


class Block(nn.Module):
    """Attention and a gated layer, fused, the second one with its dims the other way round.

    Without tanh, the gradient of the bias of k is zero, and Adam makes a whole step of its rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate_up = nn.Linear(D, 3 * D), nn.Parameter(0.3 * torch.randn(D, 2 * HIDDEN))
        self.o, self.down, self.ln = nn.Linear(D, D), nn.Linear(HIDDEN, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln(x)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k.tanh(), v).transpose(1, 2).flatten(2))
        gate, up = (x @ self.gate_up).split(HIDDEN, -1)
        return x + self.down(F.silu(gate) * up)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(LAYERS))), nn.Linear(D, 2))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def make_batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 4, D, generator=torch.Generator().manual_seed(seed))


def make_step(
    model: nn.Module | None = None,
    *,
    stored: Mapping[str, ts.Pieces] = STORED,
    sizes: tuple[int, int] = (4, 2),
    optimizer: optax.GradientTransformation | None = None,
    **options: Any,
) -> ts.TrainStep:
    asked = {"0.*.qkv": P("batch", None, "model")}
    plan = ts.ShardingPlan(RULES, default=P(), stored=stored, activations=asked)
    mesh = ts.make_mesh(batch=sizes[0], model=sizes[1], devices=jax.devices()[: sizes[0] * sizes[1]])
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return step_of(model or make_model(), loss_fn, optimizer, mesh=mesh, plan=plan, **options)


def run(step: ts.TrainStep, state: ts.TrainState | None = None, num: int = 3) -> tuple[ts.TrainState, list[float]]:
    return run_steps(step, make_batch, state, num)


@pytest.fixture(scope="module")
def trained() -> tuple[ts.TrainStep, ts.TrainState]:
    """A step, and what it made of its first state."""
    step = make_step()
    return step, run(step, num=1)[0]


def test_a_state_reads_in_torchs_shape_and_keeps_pieces(trained: Any):
    step, state = trained
    name = "0.0.qkv.weight"
    assert state.params[name].shape == (3 * D, D)
    assert state.params[name].sharding.is_equivalent_to(step.plan[name], 2)
    shapes = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert shapes[LAYERS, 3, D, D] == P(None, None, "model", None)
    assert shapes[LAYERS, D, 2, HIDDEN] == P(None, None, None, "model")
    assert (LAYERS, 3 * D, D) not in shapes
    assert step.programs[0].collectives.keys() == {"all-reduce"}
    exported = dict(step.export(state).named_parameters())
    np.testing.assert_array_equal(exported[name].detach().numpy(), state.params[name])
    assert float(step.evaluation()(state, make_batch())["loss"]) == pytest.approx(
        float(loss_fn(step.export(state), make_batch()).detach()), rel=1e-5
    )


def test_optimizers_that_look_at_shapes_see_torchs():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    state, losses = run(make_step(optimizer=optimizer))
    wanted, expected = run(make_step(optimizer=optimizer, stored={}, sizes=(1, 1)))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    check_same(state, wanted)


@pytest.mark.parametrize("is_written", [True, False])
def test_checkpoints_are_of_torchs_form(tmp_path, trained: Any, is_written: bool):
    first, second = (
        (trained[0], make_step(stored={}, sizes=(2, 2))) if is_written else (make_step(stored={}), trained[0])
    )
    check_goes_on(tmp_path, run(first)[0], (first, second), make_batch)


def test_weights_are_written_in_torchs_form(tmp_path, trained: Any):
    _, state = trained
    ts.export_safetensors(state, tmp_path / "model.safetensors")
    model = make_model()
    mesh = ts.make_mesh(batch=4, model=2)
    model = ts.load_safetensors(tmp_path / "model.safetensors", model, mesh, ts.ShardingPlan(RULES, default=P()))
    np.testing.assert_array_equal(model.get_parameter("0.1.gate_up").detach().numpy(), state.params["0.1.gate_up"])


def test_pieces_train_as_in_torch_and_nothing_moves():
    """Some of them are frozen; layers are computed again, and microbatches summed."""
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate_up" not in name)
    step = make_step(model, remat="block", accumulate_steps=2)
    state, _ = run(step)
    assert step.programs[0].collectives.keys() == {"all-reduce"}
    step.prove(state, make_batch()).raise_if_different()


def test_pieces_are_split_in_use_as_their_entry_is():
    """On three axes, an entry that is split over two of them in one dim is gathered over one where it is used."""
    mesh = ts.make_mesh(batch=2, extra=2, model=2)
    rules = {"*.*.qkv.weight": P(("extra", "model"), "batch"), "*.*.gate_up": P("batch", ("extra", "model"))}
    plan = ts.ShardingPlan(rules, default=P(), stored=STORED)
    step = step_of(make_model(), loss_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
    found = step.constraints(make_batch()).values
    entries = {(v.shape, v.axes) for v in found if v.why.startswith("an entry")}
    assert entries == {
        ((3, D, D), "0: whole, 1: extra, 2: whole"),
        ((D, 2, HIDDEN), "0: whole, 1: whole, 2: extra"),
    }
    step.prove(step.init(seed=0), make_batch()).raise_if_different()


class Softmaxed(nn.Linear):
    """A model that looks at all pieces at once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).softmax(-1).chunk(2, -1)[0]


class OfEntry(nn.Linear):
    """A model that looks at all pieces of its weight, and writes products in other ways."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        first, second = (self.weight @ input.mT).chunk(2, -2)
        return first.mT * second.mT + (input @ self.weight.softmax(0).mT)[..., :4] + input @ self.weight[4:].mT


@pytest.mark.parametrize("kind", [Softmaxed, OfEntry])
def test_an_operator_that_does_not_know_pieces_is_right_and_warned_of(
    kind: type[nn.Linear], caplog: pytest.LogCaptureFixture
):
    plan = ts.ShardingPlan({"*": P("model")}, stored={"*": ts.Pieces(2, dim=0)})
    step = step_of(kind(D, 8), loss_fn, plan=plan)
    with caplog.at_level(logging.WARNING):
        step.prove(step.init(seed=0), make_batch()).raise_if_different()
    assert "is put together for aten._softmax" in caplog.text


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"0.0.qkv.weight": ts.Pieces(5, dim=0)}, "dim 0 = 24 is not 5 pieces"),
        ({"0.0.qkv.weight": ts.Pieces(24, dim=0)}, "dim 1 = 1 is not a multiple of model=2"),
        ({"*.*.qkv.weight": ts.Pieces(3, dim=0), "0.0.*.weight": ts.Pieces(4, dim=0)}, "in different forms"),
        ({"0.0.qvk.weight": ts.Pieces(3, dim=0)}, 'The closest name is "0.0.qkv.weight"'),
    ],
)
def test_what_cannot_be_stored_so_is_refused(stored: dict[str, ts.Pieces], says: str):
    plan = ts.ShardingPlan(RULES, default=P(), stored=stored)
    with pytest.raises(ValueError, match=says.replace("*", r"\*")):
        plan.resolve(make_model(), ts.make_mesh(batch=4, model=2))


def test_an_optimizer_plan_splits_pieces_too():
    model, mesh = nn.Linear(4, 12), ts.make_mesh(jax.devices()[:6], batch=6)
    plan = ts.ShardingPlan({}, default=P(), stored={"weight": ts.Pieces(3, dim=0)})
    moments = ts.ShardingPlan({"weight": P("batch")}, default=P())
    with pytest.raises(ValueError, match=r"weight \(12, 4\): Pieces.*: dim 1 = 4 is not a multiple of batch"):
        ts.make_train_step(model, loss_fn, optax.adam(0.1), mesh=mesh, plan=plan, optimizer_plan=moments)


def test_ties_are_refused():
    model = make_model()
    layers: Any = model.get_submodule("0")
    first, second, _ = layers
    second.qkv.weight = first.qkv.weight
    with pytest.raises(ValueError, match="is tied to"):
        ts.ShardingPlan(RULES, default=P(), stored=STORED).resolve(model, ts.make_mesh(batch=4, model=2))
