"""Proof on the user's own run: a state and a batch through the step and through eager torch."""

# optax has no stubs. JAX and PyTorch annotate some of their functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from torch_shard._common.types import PyTree
from torch_shard._state import TrainState
from torch_shard._train.comparison import (
    Comparison,
    Difference,
    Values,
    array_of,
    compared,
    differences,
    in_float64,
    numbers_of,
    precision_of,
    rounding_of,
    told_apart,
)
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.replay import GradientStep, Replay
from torch_shard._train.training import Training

_ROUNDED = 1e-4  # of the largest: an optimiser such as Adam makes a whole step of a gradient that is only rounding


def prove(step: Training, state: TrainState, batch: PyTree, skip_grad_norm: float | None) -> Comparison:
    """Compare one step with eager torch; see `TrainStep.prove`."""
    placed, gradients = step.put(batch), step.gradient_step
    rows, reference, out = _rows(gradients, state, placed)
    dtype = precision_of(step.model, step.options.compute_dtype)
    if dtype == torch.float32:
        rows = told_apart(rows, lambda: _wide(gradients, state, placed), functools.partial(_again, step))
    rows += _updates(step, state, placed, out, skip_grad_norm)
    name = "eager torch" + ", which drew the random numbers of the step" * gradients.draws_random
    return compared(rows, name, step.mesh, rounding_of(dtype), [reference])


def _rows(
    step: GradientStep, state: TrainState, placed: ShardedBatch
) -> tuple[list[Difference], Values, dict[str, PyTree]]:
    """Loss, metrics, gradients and buffers beside eager torch, what they are there, and what the step gives."""
    replay = Replay(step, state, placed)
    if replay.num_draws is None:
        raise NotImplementedError(
            "TrainStep.prove: PyTorch decomposes a random operator of this loss, so that eager torch cannot draw the "
            "numbers of the step. Prove it without dropout (model.eval()), or use compare_with_torch, which compares "
            "one device with the mesh."
        )
    with _precision():
        out = step(state, placed)
    buffers = {**out["buffers"], **out["written"]}
    found = numbers_of(out["loss"], out["metrics"]) | _named("gradient", out["grads"]) | _named("buffer", buffers)
    wanted = replay.run(out["grads"]) | _named("buffer", replay.held(buffers))
    return differences([wanted], None, [found]), wanted, out


def _named(kind: str, values: Mapping[str, jax.Array | torch.Tensor]) -> Values:
    return {(kind, name): array_of(value) for name, value in values.items()}


def _wide(step: GradientStep, state: TrainState, placed: ShardedBatch) -> tuple[torch.nn.Module, PyTree]:
    """The model with a state, and the batch, in float64 on the CPU."""
    return step.cpu_model(state).double(), in_float64(placed.signature.rebuild(step.on_host(placed)))


def _again(step: Training, wide: tuple[torch.nn.Module, PyTree]) -> list[Difference]:
    (model, batch) = wide
    whole = dataclasses.replace(step.options, local_batches=False, moment_dtype=None, offload=None, compiled=None)
    again = Training(model, step.loss_fn, optax.identity(), whole)  # whose gradients alone are looked at
    return _rows(again.gradient_step, again.init(), again.put(batch))[0]


def _updates(
    step: Training, state: TrainState, placed: ShardedBatch, out: Mapping[str, PyTree], skip_grad_norm: float | None
) -> list[Difference]:
    """What the step makes of its gradients, beside optax by name: the parameters after it. None if it is skipped."""
    with _precision(), step.trial():
        new, metrics = step(jax.tree.map(jnp.copy, state), placed, skip_grad_norm=skip_grad_norm)
    if "guard" in metrics and metrics["guard"].skipped:
        return []
    held = {**dict(state.params), **out["written"]}
    params = {name: held[name] for name in out["grads"]}
    given = state, out["grads"], params, out["loss"]
    wanted, moved = (step.update_by_name(*given, moved=is_moved) for is_moved in (False, True))
    grads = {n: np.abs(array_of(out["grads"][n])) for n in params if n not in step.programs[-1].loss.without_grad}
    eps = max(float(jnp.finfo(value.dtype).eps) for value in params.values())
    least = 8 * eps * max((grad.max(initial=0) for grad in grads.values()), default=0.0)
    return [
        _update(n, (params[n], wanted[n], new.params[n]), grad, least=least, moved=moved.get(n))
        for n, grad in grads.items()
    ]


def _precision() -> contextlib.AbstractContextManager[object]:
    """Accelerators round products of float32 by default, torch does not; a CPU need not compile again."""
    return contextlib.nullcontext() if jax.default_backend() == "cpu" else jax.default_matmul_precision("highest")


def _update(
    name: str,
    values: tuple[jax.Array, jax.Array, jax.Array],
    grad: np.ndarray,
    *,
    least: float,
    moved: jax.Array | None,
) -> Difference:
    """How far an update is from that of optax, where its gradient is not only rounding: `least`, or less.

    Where a moved gradient gives another one, as a whole, and what is more than twice that.
    """
    before, wanted, found = (array_of(value).astype(np.float64) for value in values)
    steps = np.abs(wanted - before)
    rounding = 4 * float(jnp.finfo(values[0].dtype).eps) * np.abs(before).max(initial=0)
    counts = (grad > max(least, _ROUNDED * grad.max(initial=0))) | (np.isfinite(found) != np.isfinite(wanted))
    apart = np.maximum(np.abs(wanted - found) - rounding, 0)[counts]
    largest = steps.max(initial=0)
    mesh = float(apart.max(initial=0) / largest) if largest else float(apart.max(initial=0))
    if moved is not None and (slack := 2 * float(np.linalg.norm((wanted - array_of(moved))[counts]))):
        mesh = max(float(np.linalg.norm(apart)) - slack, 0.0) / float(np.linalg.norm(steps))
    return Difference("update", name, float(largest), None, mesh)
