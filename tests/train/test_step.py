"""A call of the step: nothing waits for the device, and the quick checks before it overlook nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.cases import make_mesh

WHOLE = ts.ShardingPlan({}, default=P())


def make(model: nn.Module, loss_fn: Any, sizes: tuple[int, int] = (4, 2)) -> Any:
    return ts.make_train_step(model, loss_fn, optax.sgd(0.0), mesh=make_mesh(sizes), plan=WHOLE)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def busy(rounds: jax.Array) -> jax.Array:
    """Zero, after that many rounds of work."""
    a = jax.lax.fori_loop(0, rounds, lambda i, a: jnp.sin(a @ a), jnp.full((300, 300), 0.01))
    return 0 * a.sum()


def busy_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, rounds = batch
    with torch.no_grad():
        work = ts.call_jax(busy, rounds)
    return mean_square(model, x) + work


LONG = 1000  # rounds: about a second, where a call takes about a millisecond


def test_a_call_returns_while_the_step_before_it_still_runs() -> None:
    step = make(nn.Linear(4, 4), busy_loss, (1, 1))
    state, x = step.init(), torch.ones(8, 4)
    state, _ = step(state, (x, 0))
    jax.block_until_ready(state)
    state, first = step(state, (x, LONG))
    state, second = step(state, (x, 0))
    assert not first["loss"].is_ready()
    assert float(second["loss"]) == float(first["loss"])


def test_the_next_batch_is_on_the_mesh_while_the_step_still_runs() -> None:
    step = make(nn.Linear(4, 4), busy_loss)
    state, x = step.init(), torch.ones(8, 4)
    state, _ = step(state, (x, 0))
    jax.block_until_ready(state)
    state, running = step(state, (x, LONG))
    _, arrays = step._prepare((2 * x, 0))
    jax.block_until_ready(arrays)
    assert not running["loss"].is_ready()
    np.testing.assert_array_equal(arrays[0], 2 * x)


def test_a_batch_may_be_overwritten_as_soon_as_the_call_returns() -> None:
    step = make(nn.Linear(4, 4), busy_loss, (1, 1))
    state, x = step.init(), torch.ones(8, 4)
    state, wanted = step(state, (x, 0))
    rounds = torch.tensor(LONG)
    state, metrics = step(state, (x, rounds))
    x.zero_()
    assert not metrics["loss"].is_ready()
    assert float(metrics["loss"]) == float(wanted["loss"])


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(32.0).view(4, 8).T,  # strided
        torch.arange(64.0)[::2].view(8, 4).to(torch.bfloat16),  # a dtype that numpy lacks
        torch.arange(32.0).view(4, 8).T.to(torch.bfloat16),
        torch.view_as_complex(torch.arange(64.0).view(8, 4, 2)).conj(),  # conjugated lazily
        torch.view_as_complex(torch.arange(64.0).view(8, 4, 2)).conj().imag,  # negated lazily
        torch.arange(32.0).view(8, 4).requires_grad_(),
    ],
    ids=["strided", "bfloat16", "strided bfloat16", "conj", "neg", "grad"],
)
def test_tensors_of_every_layout_arrive(batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        return model.weight.square().mean(), {"x": x}

    step = make(nn.Linear(1, 1), loss_fn)
    _, metrics = step(step.init(), batch)
    found = ts.gather(metrics["x"])
    assert found.dtype == batch.dtype
    assert torch.equal(found, batch.detach().resolve_conj().resolve_neg())


class Settings(nn.Module):
    """Plain attributes of every kind that the check before a call looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.powers, self.shift = nn.Linear(4, 4), 1.5, [1, 2], torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x).pow(sum(self.powers)) + self.shift


def change_scale(model: Any) -> None:
    model.scale = 2.5


def change_list(model: Any) -> None:
    model.powers[0] = 4


def change_type(model: Any) -> None:
    model.scale = True


def change_tensor(model: Any) -> None:
    model.shift = torch.ones(4)


def change_by_vars(model: Any) -> None:
    vars(model)["scale"] = 0.5


def delete(model: Any) -> None:
    Settings.scale = 3.5  # what `self.scale` finds then
    del model.scale


@pytest.mark.parametrize("change", [change_scale, change_list, change_type, change_tensor, change_by_vars, delete])
def test_the_step_sees_a_changed_attribute(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "scale", None, raising=False)
    torch.manual_seed(0)
    model, x = Settings(), torch.randn(8, 4)
    step = make(model, mean_square)
    state, before = step(step.init(), x)
    change(model)
    state, after = step(state, x)
    state, again = step(state, x)
    assert step.num_compiles == 2
    assert float(before["loss"]) != float(after["loss"])
    with torch.no_grad():
        # The sums of float32 have another order.
        np.testing.assert_allclose([after["loss"], again["loss"]], mean_square(model, x).item(), rtol=1e-5)


def test_an_attribute_that_gets_an_equal_value_compiles_nothing() -> None:
    model, x = Settings(), torch.ones(8, 4)
    step = make(model, mean_square)
    state, _ = step(step.init(), x)
    for _ in range(2):
        model.scale, model.powers = float("1.5"), [1, 2]
        state, _ = step(state, x)
    assert step.num_compiles == 1


def test_flags_are_read_at_each_call() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(8, 4)
    step = make(model, mean_square)
    state, _ = step(step.init(), x)
    model[1].training = False
    state, _ = step(state, x)
    model[1].training = True
    state, _ = step(state, x)
    assert step.num_compiles == 2
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of 0\.bias has changed"):
        step(state, x)
    model[0].bias.requires_grad_(True)
    step(state, x)
