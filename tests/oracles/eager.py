"""The oracle: what eager torch does over some steps, and the comparison of a compiled run with it."""

import copy
import time
from typing import Any

import jax
import numpy as np
import optax
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import Case, make_mesh

LEARNING_RATE, MOMENTUM = 0.05, 0.9


def record_grads() -> optax.GradientTransformation:
    """Keeps the last gradients in its state, so that a test can look at them."""
    return optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, grads))


def optimizer() -> optax.GradientTransformation:
    return optax.chain(record_grads(), optax.sgd(LEARNING_RATE, momentum=MOMENTUM))


def eager_trajectory(case: Case, num_steps: int) -> list[dict[str, Any]]:
    """Loss, metrics, gradients, and every parameter and buffer after each step of eager torch."""
    model = case.model()
    params = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)
    steps = []
    for batch in case.batches(num_steps):
        sgd.zero_grad()
        result = case.loss_fn(model, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        loss.backward()
        grads = {n: _copy(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        sgd.step()
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        numbers = {name: value.item() for name, value in {"loss": loss, **metrics}.items()}
        steps.append({"metrics": numbers, "grads": grads, "held": {n: _copy(t) for n, t in held.items()}})
    return steps


def _copy(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor.clone()).numpy()


def assert_close(found: Any, wanted: np.ndarray, rtol: float, floor: float, name: str) -> None:
    """Equal up to `rtol` of the tensor's largest value, or up to `floor`: what is zero but for rounding."""
    found = np.asarray(found)
    assert found.shape == wanted.shape, name
    largest = np.abs(wanted).max(initial=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=rtol * largest + floor, err_msg=name)


def assert_follows(
    case: Case,
    model: torch.nn.Module,
    trajectory: list[dict[str, Any]],
    sizes: Any,
    *,
    seconds: list[float] | None = None,
    look_again: bool = False,
) -> Any:
    """A training step on a mesh gives the losses, gradients, parameters and buffers of `trajectory`; returns it.

    Args:
        case: The model's, with its batches, its loss and its plan.
        model: Of the case.
        trajectory: Of eager torch.
        sizes: Of the mesh.
        seconds: Gets the time of each step.
        look_again: Whether the step looks at the loss again before its second call, which costs a capture.
    """
    options = {"mesh": make_mesh(sizes), "plan": case.plan, "look_again": look_again}
    step = ts.make_train_step(model, case.loss_fn, optimizer(), **options)
    state = step.init(seed=0)
    for batch, wanted in zip(case.batches(len(trajectory)), trajectory, strict=True):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        found = {name: np.asarray(metrics[name]) for name in wanted["metrics"]}
        if seconds is not None:
            seconds.append(time.perf_counter() - start)
        for name, value in wanted["metrics"].items():
            np.testing.assert_allclose(found[name], value, rtol=case.rtol, err_msg=name)
        grads = state.opt_state[0]
        assert {n for n, g in grads.items() if np.any(g)} <= set(wanted["grads"])
        # A bias before a batch norm has no gradient but rounding, which scales with the other gradients.
        floor = 2e-6 * max(np.abs(g).max() for g in wanted["grads"].values())
        for name, grad in wanted["grads"].items():
            assert_close(grads[name], grad, 10 * case.rtol, floor, f"gradient of {name}")  # it builds up by step
        made = {
            name: buffer.numpy() for program in step.programs for name, buffer, _ in program.loss.captured.made_buffers
        }
        for name, value in wanted["held"].items():
            assert_close(made[name] if name in made else state.tensors[name], value, 10 * case.rtol, floor, name)
    asks = any(program.loss.reads_batch for program in step.programs)  # then there is a program for each answer
    assert step.num_compiles == (len(step.programs) if asks else 1)
    assert set(state.tensors) == set(trajectory[0]["held"]) - set(made)
    _assert_layout(state, step)
    return step


def _assert_layout(state: ts.TrainState, step: ts.TrainStep) -> None:
    """Every leaf of the state lies as the plan says, moments like their parameters."""
    resolved = step.plan
    for name, array in state.tensors.items():
        assert array.sharding.is_equivalent_to(resolved[name], array.ndim), name
    for name, moment in state.opt_state[1][0].trace.items():
        assert moment.sharding.is_equivalent_to(resolved[name], moment.ndim), name
    jax.block_until_ready(state)


class _Loss(nn.Module):
    """A loss as a module, which runs with other values of its parameters and buffers."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.model, batch)


def loss_on_cpu(model: nn.Module, loss_fn: Any, batch: Any) -> float:
    """The loss of eager torch as a live model is now: its code and attributes, and its values on the CPU."""
    loss = _Loss(model, loss_fn)
    held = {**dict(loss.named_parameters()), **dict(loss.named_buffers())}
    values = {name: tensor.detach().cpu() for name, tensor in held.items()}
    return torch.func.functional_call(loss, values, (batch,)).item()


def agrees_with_torch(
    model: nn.Module,
    loss_fn: Any,
    batches: list[Any],
    mesh: Any = (4, 2),
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> ts.TrainStep:
    """SGD with momentum, several steps: every parameter against eager torch; gives the step."""
    step = step_of(model, loss_fn, optax.sgd(0.1, momentum=0.9), mesh=mesh, **options)
    wanted, state = copy.deepcopy(model), step.init()
    sgd = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        state, metrics = step(state, batch)
        sgd.zero_grad()
        loss = loss_fn(wanted, batch)
        loss.backward()
        sgd.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=rtol / 10)
    for name, parameter in wanted.named_parameters():
        found = state.tensors[name]
        np.testing.assert_allclose(found, parameter.detach(), rtol=rtol, atol=atol, err_msg=name)
    return step
