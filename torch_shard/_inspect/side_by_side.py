"""The same training by a step and by eager torch: what each makes of every batch, by kind and name."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
import optax
import torch
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import MetricCalls
from torch_shard._common.types import PyTree
from torch_shard._state import TrainState
from torch_shard._train import (
    TrainStep,
    Values,
    array_of,
    eager_gradients,
    eager_loss,
    like_model,
    numbers_of,
    together,
)

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer of torch from a list of parameters."""


def keeping_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, with the last gradients in its state."""
    kept = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, updates))
    return optax.chain(kept, optimizer)


def train_on_mesh(step: TrainStep, batches: Sequence[PyTree]) -> list[Values]:
    """Train by a step whose optimizer is `keeping_gradients`.

    Returns:
        After each batch: loss, metrics, gradients, parameters and buffers.
    """
    state, found = step.init(), list[Values]()
    # Accelerators round products of float32 by default, torch does not; metric objects count a run's own steps.
    with jax.default_matmul_precision("highest"), MetricCalls().noted():
        for batch in batches:
            state, metrics = step(state, batch)
            (kept, _) = cast(tuple[PyTree, PyTree], state.opt_state)
            grads = {("gradient", name): array_of(grad) for name, grad in kept.items()}
            own = {name: value for name, value in metrics.items() if name not in ("loss", "grad_norm")}
            found.append(numbers_of(metrics["loss"], own) | grads | _held(state, state.tensors))
    return found


def train_in_torch(step: TrainStep, batches: Sequence[PyTree], make_optimizer: MakeOptimizer) -> list[Values]:
    """Train by eager torch on the CPU, from where a step begins.

    Args:
        step: Says the model, the loss and the precision.
        batches: One for each step.
        make_optimizer: For the same rule as the step's.

    Returns:
        As `train_on_mesh` does.
    """
    state = step.init()
    model = like_model(step.export(state), step.model)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    found = list[Values]()
    for batch in batches:
        optimizer.zero_grad()
        losses, metrics = list[torch.Tensor](), list[dict[str, PyTree]]()
        parts = [batch] if step.options.accumulate_steps == 1 else step.gradient_step.microbatches(step.put(batch))
        for part in parts:
            loss, own = eager_loss(step, model, torch_pytree.tree_map(_copied, part))
            (loss / len(parts)).backward()
            losses.append(loss.detach())
            metrics.append(own)
        grads = eager_gradients(model, state.params)
        optimizer.step()
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        whole = jax.tree.map(array_of, metrics[0] if len(parts) == 1 else jax.tree.map(together, *metrics))
        numbers = numbers_of(torch.stack(losses).mean(), whole)
        found.append(numbers | grads | _held(state, {name: held[name] for name in state.tensors}))
    return found


def _held(state: TrainState, tensors: Mapping[str, PyTree]) -> Values:
    """Parameters and buffers."""
    return {("buffer" if n in state.buffers else "parameter", n): array_of(value) for n, value in tensors.items()}


def _copied(leaf: PyTree) -> PyTree:
    return torch.as_tensor(leaf).clone() if isinstance(leaf, (torch.Tensor, np.ndarray)) else leaf
