"""Tables of 64-bit floating point that a loss closes over, as diffusion models have them."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import BATCH

TABLE = np.linspace(0.1, 1.0, 16) ** 2
HUGE = np.full(8, 1e300)
STEPS = torch.arange(BATCH) % 16


def scaled(weights: Callable[[], torch.Tensor]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda model, x: (model(x) * weights()).square().mean()


def loss_of(loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor], depth: int = 1) -> tuple[float, float]:
    """Of a step, and of eager torch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), torch.randn(BATCH, 8)
    wanted, step = loss_fn(model, x).item(), step_of(model, loss_fn)
    return float(step(step.init(), x)[1]["loss"]), wanted


@pytest.mark.parametrize(
    "weights",
    [
        lambda: torch.from_numpy(TABLE)[STEPS].float()[:, None],
        lambda: torch.from_numpy(TABLE).to(STEPS.device).gather(0, STEPS).view(-1, 1).to(torch.float32),
        lambda: torch.tensor([0.5, 1e-9], dtype=torch.float64).bfloat16()[:1],
    ],
)
def test_what_is_converted_before_it_is_used_is_as_in_torch(weights, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found, wanted = loss_of(scaled(weights))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)  # sums in another order
    assert not caplog.records


class Weighted(nn.Linear):
    table = torch.from_numpy(TABLE)[:8]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (super().forward(input) * self.table).float()


@pytest.mark.parametrize("depth", [1, 4])
def test_what_is_computed_with_is_rounded_and_said_with_its_line(
    depth: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loss, and in layers that are one loop."""
    monkeypatch.setattr(nn, "Linear", Weighted)
    with caplog.at_level(logging.WARNING):
        found, wanted = loss_of(scaled(lambda: torch.ones(())), depth)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)  # 64 bits against 32
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("make_train_step: the loss computes with closed-over tensors of 64-bit floating point, of")
    assert "Write tensor.float() where it is used, or jax.config.update('jax_enable_x64', True) at the start." in said
    assert f'torch.float64 (8,): {"Sequential.0: " * (depth == 1)}File "{__file__}", line' in said
    assert "return (super().forward(input) * self.table).float()" in said


def test_adapters_do_so_too(caplog: pytest.LogCaptureFixture) -> None:
    x, table = torch.arange(16.0), torch.from_numpy(TABLE)
    exact, rounded = ts.jax_jit(lambda x: x * table.float()), ts.jax_jit(lambda x: x * table)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(exact(x.to("jax")).cpu(), x * table.float(), rtol=0, atol=0)
        assert not caplog.records
        torch.testing.assert_close(rounded(x.to("jax")).cpu(), (x * table).float())
    assert "jit.<locals>" not in caplog.text
    assert "computes with closed-over tensors of 64-bit floating point" in caplog.text


def test_what_32_bits_cannot_hold_is_refused_by_name() -> None:
    said = r"a tensor that is closed over: A float64 array of shape \(8,\) has values from .*, which do not fit float32"
    with pytest.raises(OverflowError, match="make_train_step: " + said):
        loss_of(scaled(lambda: torch.from_numpy(HUGE) * 1e-300))
