"""Autocast regions, mixed precision of a step, and models of another dtype, against eager torch."""

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
from tests.oracles.eager import record_grads
from tests.oracles.steps import sgd_step
from tests.tables.cases import make_mesh

# bfloat16 has 8 bits: a rounding is up to 2^-9 of a value, and a result meets a handful of them.
BFLOAT16 = 2e-2

PLAN = ts.ShardingPlan({"0.weight": P("model"), "3.weight": P(None, "model")}, default=P())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1))


def loss_fn(m: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(m(batch) * 16, batch)


def autocast_loss(device: str) -> Any:
    def loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss_fn(m, batch)

    return loss


def batch() -> torch.Tensor:
    return torch.linspace(-2, 2, 8 * 16).view(8, 16).sin()


def one_step(m: nn.Module, loss: Any, data: torch.Tensor, sizes: Any = (4, 2), **options: Any) -> Any:
    optimizer = optax.chain(record_grads(), optax.sgd(0.1))
    step = ts.make_train_step(m, loss, optimizer, mesh=make_mesh(sizes), plan=PLAN, **options)
    return step(step.init(), data)


LOW = {  # the loss, that of eager torch, the dtype of all parameters, and options
    "cpu": (autocast_loss("cpu"), autocast_loss("cpu"), torch.float32, {}),
    "cuda": (autocast_loss("cuda"), autocast_loss("cpu"), torch.float32, {}),
    "jax": (autocast_loss("jax"), autocast_loss("cpu"), torch.float32, {}),
    "compute_dtype": (loss_fn, autocast_loss("cpu"), torch.float32, {"compute_dtype": torch.bfloat16}),
    "bfloat16": (loss_fn, loss_fn, torch.bfloat16, {}),
    "float16": (loss_fn, loss_fn, torch.float16, {}),
}


@pytest.mark.parametrize("name", LOW)
def test_low_precision_equals_eager_torch(name: str) -> None:
    """By autocast regions, by a step's compute_dtype, by a model of that dtype: parameters and moments keep theirs."""
    loss, eager_loss, dtype, options = LOW[name]
    eager, data = model().to(dtype), batch().to(dtype)
    wanted = eager_loss(eager, data)
    wanted.backward()
    state, metrics = one_step(model().to(dtype), loss, data, **options)
    np.testing.assert_allclose(np.float32(metrics["loss"]), wanted.item(), rtol=BFLOAT16)
    held = {leaf.dtype for leaf in (metrics["loss"], *jax.tree.leaves((state.tensors, state.opt_state)))}
    assert held == {jax.numpy.dtype(str(dtype).removeprefix("torch."))}
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad.float().numpy()
        # in a model of that dtype every operator rounds, not just the products
        tolerance = np.abs(grad).max() * (BFLOAT16 if dtype is torch.float32 else 2 * BFLOAT16)
        np.testing.assert_allclose(np.float32(state.opt_state[0][name]), grad, rtol=0, atol=tolerance, err_msg=name)


MADE_BEFORE = {device: torch.autocast(device, dtype=torch.bfloat16) for device in ("cpu", "jax")}


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_region_made_before_the_loss_is_one_made_in_it(device: str) -> None:
    """As in scripts that choose it once, at the top, between torch.autocast and nullcontext."""
    region, seen = MADE_BEFORE[device], list[torch.dtype]()

    def loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
        with region, region:
            seen.append(m[0](batch).dtype)
            with torch.autocast(device, enabled=False):
                seen.append(m[0](batch).dtype)
            seen.append(m[0](batch).exp().dtype)
            found = loss_fn(m, batch)
        seen.append(m[0](batch).dtype)
        return found

    _, metrics = one_step(model(), loss, batch())
    wanted = autocast_loss("cpu")(model(), batch()).item()
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=BFLOAT16)
    exp = torch.float32 if device == "jax" else torch.bfloat16  # PyTorch's tables for CUDA and for the CPU
    assert seen[:4] == [torch.bfloat16, torch.float32, exp, torch.float32]


FLOAT16 = {
    "default of cuda": lambda: torch.autocast("cuda"),
    "cuda": lambda: torch.autocast("cuda", dtype=torch.float16),
    "cpu": lambda: torch.autocast("cpu", dtype=torch.float16),
    "made before": lambda before=torch.autocast("jax", dtype=torch.float16): before,  # noqa: B008
}


@pytest.mark.parametrize("region", FLOAT16.values(), ids=FLOAT16)
def test_float16_autocast_is_refused_where_gradients_are_taken(region: Any) -> None:
    def loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
        with region():
            return loss_fn(m, batch).float()

    said = r"""(?s)File ".*test_autocast.py", line \d+, in loss: with region\(\):
Here torch.autocast computes in float16 .*torch.autocast\(device_type, dtype=torch.bfloat16\).*compute_dtype=torch.bf"""
    with pytest.raises(NotImplementedError, match=said):
        one_step(model(), loss, batch())


def test_float16_autocast_is_taken_where_no_gradients_are() -> None:
    def loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"), torch.autocast("cpu", dtype=torch.float16), FLOAT16["made before"]():
            return loss_fn(m, batch).float()

    step = sgd_step(model(), loss_fn, (4, 2), plan=PLAN)
    evaluation = ts.make_eval_step(model(), loss, mesh=make_mesh((4, 2)), plan=PLAN)
    found = float(evaluation(step.init(), batch())["loss"])
    np.testing.assert_allclose(found, loss_fn(model(), batch()).item(), rtol=BFLOAT16)


def test_float16_autocast_around_a_step_is_refused_and_around_a_teacher_is_not() -> None:
    with torch.autocast("jax", dtype=torch.float16), pytest.raises(NotImplementedError, match="computes in float16"):
        one_step(model(), loss_fn, batch())
    teacher = model()

    def distilled(m: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            wanted = teacher(batch)
        return F.mse_loss(m(batch) * 2, wanted.float())

    eager = F.mse_loss(model()(batch()) * 2, teacher(batch())).item()
    np.testing.assert_allclose(one_step(model(), distilled, batch())[1]["loss"], eager, rtol=BFLOAT16)


def test_a_scaled_loss_is_refused() -> None:
    def loss(m: Any, batch: torch.Tensor, scaler: Any) -> Any:
        return scaler.scale(loss_fn(m, batch))

    enabled, disabled = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    said = r"(?s)test_autocast.py.*Here a GradScaler scales the loss, and nothing would unscale.*delete the scaler"
    with pytest.raises(NotImplementedError, match=said):
        one_step(model(), lambda m, batch: loss(m, batch, enabled), batch())
    one_step(model(), lambda m, batch: loss(m, batch, disabled), batch())


def test_autocast_gives_the_dtypes_of_its_device() -> None:
    def forward(x: torch.Tensor, m: nn.Sequential, device: str) -> list[torch.Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = m[0](x)
            outputs = [hidden, m[1](hidden), hidden.exp(), hidden + 1, hidden.softmax(-1), hidden @ m[3].weight.T]
            with torch.autocast(device, enabled=False):
                return [*outputs, hidden.float() @ m[3].weight.T]

    m, x = model(), batch()
    low, high = torch.bfloat16, torch.float32
    on_cpu = [o.dtype for o in forward(x, m, "cpu")]
    assert [o.dtype for o in ts.jax_jit(lambda x: forward(x, m, "cpu"))(x)] == on_cpu
    for device in ("cuda", "jax"):  # PyTorch's table of operators for CUDA
        found = [o.dtype for o in ts.jax_jit(lambda x, device=device: forward(x, m, device))(x)]
        assert found == [low, high, high, low, high, low, high]
    m.to("jax")
    assert [o.dtype for o in forward(x.to("jax"), m, "jax")] == found  # eager, on the device


def test_autocast_around_a_compiled_function() -> None:
    m, x = model(), batch()
    jitted = ts.jax_jit(m[0])
    assert jitted(x).dtype is torch.float32
    for device in ("cpu", "jax"):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert jitted(x).dtype is torch.bfloat16
    assert jitted(x).dtype is torch.float32


def test_compute_dtype_is_where_it_says() -> None:
    """Products in bfloat16, norm and softmax in float32: read off the program."""
    step = sgd_step(model(), loss_fn, plan=PLAN, compute_dtype=torch.bfloat16)
    lines = step.lower(step.init(), batch()).as_text().splitlines()
    products = [line for line in lines if "dot_general" in line]
    assert products
    assert all("bf16" in line for line in products)
    assert not any("bf16" in line for line in lines if "exponential" in line or "rsqrt" in line)


def test_evaluation_has_a_compute_dtype_too() -> None:
    m, dtypes = model(), list[torch.dtype]()

    def loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
        dtypes.append(m[0](batch).dtype)
        return loss_fn(m, batch)

    wanted = loss_fn(m, batch()).item()
    evaluation = ts.make_eval_step(m, loss, mesh=make_mesh((4, 2)), plan=PLAN, compute_dtype=torch.bfloat16)
    state = sgd_step(m, loss_fn, (4, 2), plan=PLAN).init()
    found = float(evaluation(state, batch())["loss"])
    assert set(dtypes) == {torch.bfloat16}
    np.testing.assert_allclose(found, wanted, rtol=BFLOAT16)


def test_float64_needs_x64_and_is_then_exact() -> None:
    eager, data = model().double(), batch().double()
    with pytest.raises(TypeError, match=r"(?s)float64.*64 bits.*jax_enable_x64"):
        one_step(model().double(), loss_fn, data)
    wanted = loss_fn(eager, data)
    wanted.backward()
    with jax.enable_x64(True):
        state, metrics = one_step(model().double(), loss_fn, data)
        np.testing.assert_allclose(metrics["loss"], wanted.item(), rtol=1e-12)
        for name, parameter in eager.named_parameters():
            np.testing.assert_allclose(state.opt_state[0][name], parameter.grad, atol=1e-13, err_msg=name)
