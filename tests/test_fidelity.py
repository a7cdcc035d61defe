"""Loss, every gradient, every updated parameter and buffer against eager torch, on every mesh, over several steps."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import torch_shard as ts
from tests.cases import CASES, MESHES, Case, make_mesh

NUM_STEPS = 3
LEARNING_RATE, MOMENTUM = 0.05, 0.9


def record_grads() -> optax.GradientTransformation:
    """Keeps the last gradients in its state, so that a test can look at them."""
    return optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, grads))


def optimizer() -> optax.GradientTransformation:
    return optax.chain(record_grads(), optax.sgd(LEARNING_RATE, momentum=MOMENTUM))


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case) -> torch.nn.Module:
    """One model for all meshes: it is captured once."""
    return case.model()


@pytest.fixture(scope="module")
def trajectory(case: Case) -> list[dict[str, Any]]:
    """What eager torch does."""
    model = case.model()
    params = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)
    steps = []
    for batch in case.batches(NUM_STEPS):
        sgd.zero_grad()
        loss = case.loss_fn(model, batch)
        loss.backward()
        grads = {n: _copy(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        sgd.step()
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        steps.append({"loss": loss.item(), "grads": grads, "held": {n: _copy(t) for n, t in held.items()}})
    return steps


def _copy(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().clone().numpy()


def assert_close(found: Any, wanted: np.ndarray, rtol: float, floor: float, name: str) -> None:
    """Equal up to `rtol` of the tensor's largest value, or up to `floor`: what is zero but for rounding."""
    found = np.asarray(found)
    assert found.shape == wanted.shape, name
    largest = np.abs(wanted).max(initial=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=rtol * largest + floor, err_msg=name)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_steps_equal_eager_torch_on_every_mesh(case: Case, model: Any, trajectory: Any, sizes: Any) -> None:
    step = ts.make_train_step(model, case.loss_fn, optimizer(), mesh=make_mesh(sizes), plan=case.plan)
    state = step.init(seed=0)
    for batch, wanted in zip(case.batches(NUM_STEPS), trajectory, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=case.rtol)
        grads = state.opt_state[0]
        assert {n for n, g in grads.items() if np.any(g)} <= set(wanted["grads"])
        # A bias before a batch norm has no gradient but rounding, which scales with the other gradients.
        floor = 2e-6 * max(np.abs(g).max() for g in wanted["grads"].values())
        for name, grad in wanted["grads"].items():
            assert_close(grads[name], grad, 10 * case.rtol, floor, f"gradient of {name}")  # it builds up by step
        for name, value in wanted["held"].items():
            assert_close(state.tensors[name], value, 10 * case.rtol, floor, name)
    assert step.num_compiles == 1
    assert set(state.tensors) == set(trajectory[0]["held"])
    assert_layout(state, step)


def assert_layout(state: ts.TrainState, step: ts.TrainStep) -> None:
    """Every leaf of the state lies as the plan says, moments like their parameters."""
    resolved = step.plan
    for name, array in state.tensors.items():
        assert array.sharding.is_equivalent_to(resolved[name], array.ndim), name
    for name, moment in state.opt_state[1][0].trace.items():
        assert moment.sharding.is_equivalent_to(resolved[name], moment.ndim), name
    jax.block_until_ready(state)
