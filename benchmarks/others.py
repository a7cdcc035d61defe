"""Other ways to train the same torch model, each as a function of a batch that returns the loss and waits for it."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import optax
import torch
from torch import nn

import torch_shard as ts

LossFn = Callable[[nn.Module, Any], torch.Tensor]
Side = Callable[[Any], float]


class _WithLoss(nn.Module):
    """A model and its loss as one module, for `functional_call`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.model, batch)


def _pure_loss(model: nn.Module, loss_fn: LossFn) -> Callable[[dict[str, Any], Any], torch.Tensor]:
    module = _WithLoss(model, loss_fn)

    def loss(params: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        return torch.func.functional_call(module, params, (batch,))

    return loss


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}


def eager_torch(model: nn.Module, loss_fn: LossFn, learning_rate: float) -> Side:
    """Eager torch on the CPU with `torch.optim.AdamW`, set as `optax.adamw`."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=1e-4)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def documents_loop(model: nn.Module, loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Side:
    """The source document's loop: jitted value and gradient, then an eager optax update through `call_jax`."""
    value_and_grad = ts.jax_jit(ts.jax_value_and_grad(_pure_loss(model, loss_fn)))
    params = {name: value.to("jax") for name, value in _values(model).items()}
    held = [params, ts.call_jax(optimizer.init, params)]

    def step(batch: Any) -> float:
        params, opt_state = held
        loss, grads = value_and_grad(params, batch)
        updates, held[1] = ts.call_jax(optimizer.update, grads, opt_state, params)
        held[0] = ts.call_jax(optax.apply_updates, params, updates)
        jax.block_until_ready(ts.jax_view(held[0]))
        return float(loss)

    return step


def torchax_tracing(model: nn.Module, loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Side:
    """Torchax's tensor wrapper traces the loss, JAX differentiates the trace, one donated jit holds the whole step."""
    import torchax.interop

    loss = _pure_loss(model, loss_fn)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value_and_grad = jax.value_and_grad(lambda p: torchax.interop.call_torch(loss, p, batch))
        value, grads = value_and_grad(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    params = {name: jax.device_put(value.numpy()) for name, value in _values(model).items()}
    held = [params, optimizer.init(params)]

    def step(batch: Any) -> float:
        held[0], held[1], value = jitted(*held, tuple(jax.device_put(t.numpy()) for t in batch))
        jax.block_until_ready(held)
        return float(value)

    return step
