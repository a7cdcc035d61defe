"""Ours, and other ways to train the same torch model: each a function of a batch that waits and returns the loss."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch
from torch import nn

import torch_shard as ts
from benchmarks.handwritten import Values

LossFn = Callable[[nn.Module, Any], torch.Tensor]
Side = Callable[[Any], float]
LEARNING_RATE = 1e-4


class Ours:
    """Our train step with its state."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, mesh: jax.sharding.Mesh, specs: dict[str, Any], **options: Any
    ) -> None:
        self.model, self.mesh, self.optimizer = model, mesh, optax.adamw(LEARNING_RATE)
        plan = ts.ShardingPlan(specs, default=jax.P())
        self.step = ts.make_train_step(model, loss_fn, self.optimizer, mesh=mesh, plan=plan, **options)
        self.state: Any = None

    def values(self) -> Values:
        """Where rivals start: our model's values, split as ours."""
        return start_of(self.model, {name: sharding.spec for name, sharding in self.step.plan.items()})

    def __call__(self, batch: Any) -> float:
        """Train by one step, wait for it, and return the loss."""
        if self.state is None:
            self.state = self.step.init(seed=0)
        self.state, metrics = self.step(self.state, batch)
        return float(jax.block_until_ready((self.state, metrics))[1]["loss"])

    def compiled(self, batch: Any) -> jax.stages.Compiled:
        """The compiled program."""
        return self.step.lower(self.step.init(seed=0), batch).compile()


def shapes(ours: Ours) -> Any:
    """The state of `step.init` as shapes with shardings: nothing is placed."""
    step, params = ours.step, dict(ours.model.named_parameters())
    arrays = {n: jax.ShapeDtypeStruct(tuple(p.shape), np.float32) for n, p in params.items()}
    state = ts.TrainState(
        step=jax.ShapeDtypeStruct((), np.int32),
        params=arrays,
        frozen={},
        buffers={},
        opt_state=jax.eval_shape(ours.optimizer.init, arrays),
        key=jax.eval_shape(lambda: jax.random.key(0)),
        num_batches=jax.ShapeDtypeStruct((), np.int32),
    )
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, step.shardings)


def start_of(model: nn.Module, specs: dict[str, Any] | None = None) -> Values:
    """What a model holds, and how it is split: by default not at all."""
    params = {n: p.detach().numpy() for n, p in model.named_parameters()}
    buffers = {n: b.numpy().astype(np.float32) for n, b in model.named_buffers()}
    return Values(params, buffers, {n: specs[n] if specs else jax.P() for n in (*params, *buffers)})


# ---- torch itself ----------------------------------------------------------------------------------------------


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Torch's AdamW, set as `optax.adamw`, in its fused form, which refuses to mix kinds of tensors in a group."""
    kinds: dict[type, list[Any]] = {}
    for p in model.parameters():
        kinds.setdefault(type(p.data), []).append(p)
    groups = [{"params": params} for params in kinds.values()]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=1e-4, fused=True)


def eager_torch(model: nn.Module, loss_fn: LossFn) -> Side:
    """Eager torch on the CPU."""
    model = copy.deepcopy(model)
    return _torch_loop(model, lambda batch: loss_fn(model, batch))


def compiled_torch(model: nn.Module, loss_fn: LossFn) -> Side:
    """`torch.compile` of model and loss as one graph."""
    model = copy.deepcopy(model)
    return _torch_loop(model, torch.compile(lambda batch: loss_fn(model, batch), fullgraph=True))


def _torch_loop(model: nn.Module, loss_of: Callable[[Any], torch.Tensor]) -> Side:
    optimizer = torch_adamw(model)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# ---- from torch to JAX -----------------------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """A model and its loss as one module, for `functional_call`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.model, batch)


def documents_loop(model: nn.Module, loss_fn: LossFn) -> Side:
    """Jitted value and gradient, then an eager optax update through `call_jax`: the adapters one by one."""
    module, optimizer = _WithLoss(copy.deepcopy(model), loss_fn), optax.adamw(LEARNING_RATE)

    def loss_of(params: Any, buffers: Any, batch: Any) -> Any:
        held = {n: b.clone() for n, b in buffers.items()}  # a capture refuses to write to its arguments
        return torch.func.functional_call(module, {**params, **held}, (batch,)), held

    value_and_grad = ts.jax_jit(ts.jax_value_and_grad(loss_of, has_aux=True))
    params, buffers = ({n: t.detach().to("jax") for n, t in entries} for entries in _entries(module))
    held = [params, buffers, ts.call_jax(optimizer.init, params)]

    def step(batch: Any) -> float:
        params, buffers, opt_state = held
        (loss, held[1]), grads = value_and_grad(params, buffers, batch)
        updates, held[2] = ts.call_jax(optimizer.update, grads, opt_state, params)
        held[0] = ts.call_jax(optax.apply_updates, params, updates)
        jax.block_until_ready(ts.jax_view(held[0]))
        return float(loss)

    return step


def _entries(module: nn.Module) -> tuple[list[Any], list[Any]]:
    return list(module.named_parameters()), list(module.named_buffers())


def torchax_step(model: nn.Module, loss_fn: LossFn) -> Side:
    """Torchax alone: its `make_train_step` under its `jax_jit`, donated. It gives no buffers back."""
    import torchax
    from torchax import interop
    from torchax.train import make_train_step

    module, optimizer = _WithLoss(copy.deepcopy(model), loss_fn), optax.adamw(LEARNING_RATE)

    def model_fn(weights: Any, buffers: Any, batch: Any) -> Any:
        return torch.func.functional_call(module, {**weights, **buffers}, (batch,))

    step = make_train_step(model_fn, lambda loss, _: loss, optimizer)
    jitted = interop.jax_jit(step, kwargs_for_jax_jit={"donate_argnums": (0, 2)})
    arrays = ({n: jax.device_put(t.detach().numpy()) for n, t in entries} for entries in _entries(module))
    weights, buffers = (interop.torch_view(part) for part in arrays)
    held = [weights, interop.call_jax(optimizer.init, weights)]
    torchax.default_env()

    def run(batch: Any) -> float:
        placed = interop.torch_view(tuple(jax.device_put(t.numpy()) for t in batch))
        loss, *held[:] = jitted(held[0], buffers, held[1], placed, None)
        return float(jax.block_until_ready(interop.jax_view((loss, held)))[0])

    return run
