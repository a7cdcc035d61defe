"""What scripts of torch do with a loss after it has come from a step says what to write; all else is as it was."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from tests.oracles.steps import step_of


@pytest.fixture(scope="module")
def loss() -> jax.Array:
    step = step_of(nn.Linear(4, 2))
    _, metrics = step(step.init(seed=0), torch.ones(8, 4))
    return metrics["loss"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("backward", r"no attribute 'backward': the step .* Leave loss\.backward\(\) and optimizer\.step\(\) out"),
        ("detach", r"no attribute 'detach': metrics are arrays of JAX.*float\(x\)"),
        ("cpu", r"no attribute 'cpu': metrics are arrays"),
        ("numpy", r"no attribute 'numpy': metrics are arrays"),
    ],
)
def test_a_method_of_tensors_says_what_to_write(loss: jax.Array, name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(loss, name)()
    assert not hasattr(loss, name)
    assert getattr(jnp.ones(2), name, None) is None


def test_a_scaler_of_a_metric_says_what_to_write(loss: jax.Array) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(TypeError, match=r"^GradScaler\.scale: the step .*compute_dtype=torch\.bfloat16"):
        scaler.scale(loss)
    assert scaler.scale(torch.tensor(2.0)).item() == 16.0
    assert [x.item() for x in scaler.scale([torch.tensor(1.0), torch.tensor(3.0)])] == [8.0, 24.0]
    assert scaler.scale.__name__ == "scale"
    assert torch.amp.GradScaler("cpu", enabled=False).scale(torch.tensor(2.0)).item() == 2.0


def test_a_metric_is_a_plain_array_otherwise(loss: jax.Array) -> None:
    assert type(loss) is type(jnp.ones(2))
    assert loss.item() == float(loss) == float(jax.jit(lambda x: x)(loss))
