"""Proof on the user's own run: a state and a batch through the step and through eager torch."""

# optax has no stubs. JAX and PyTorch annotate some of their functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import Sharding

from torch_shard._capture import MetricCalls
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._hosts import follow
from torch_shard._loss import CALLS, LossProgram
from torch_shard._sharding import Stacks, constrain_stacks
from torch_shard._state import TrainState
from torch_shard._train.comparison import (
    ROUNDING,
    Comparison,
    Difference,
    Values,
    array_of,
    compared,
    differences,
    in_float64,
    numbers_of,
    precision_of,
    told_apart,
)
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.replay import Replay, cpu_model
from torch_shard._train.step import Step

if TYPE_CHECKING:
    from torch_shard._train.train_step import TrainStep

_ROUNDED = 1e-4  # of the largest: an optimiser such as Adam makes a whole step of a gradient that is only rounding


class GradientStep(Step):
    """Loss, metrics, gradients and buffers of a train step, as a program of their own that keeps the state."""

    caller, train = "TrainStep.prove", True

    def __call__(self, state: TrainState, placed: ShardedBatch) -> dict[str, PyTree]:
        """Give them by name."""
        program, arrays = self._prepare(placed, state)
        out = program(self._normal(state), arrays)
        follow(out["loss"])
        return out

    def _jit(
        self, program: LossProgram, batch_shardings: list[Sharding], skip_grad_norm: float | None
    ) -> Callable[..., PyTree]:
        run = self._microbatches.run(program, self.plan)

        def gradients(state: TrainState, batch: list[jax.Array], closure: list[jax.Array]) -> dict[str, PyTree]:
            out = run(jax.random.fold_in(state.key, state.step), state.tensors, batch, closure)
            grads = Stacks.from_dict(out.grads, [(name,) for name in out.grads])
            grads = constrain_stacks(grads, [self.optimizer_plan[name] for name in grads], self.layout.data_axes)
            parts = {"grads": grads, "buffers": out.buffers, "written": out.written}
            metrics = {name: value for name, value in out.metrics.items() if name != CALLS}
            return {"loss": out.loss, "metrics": metrics, **{name: dict(part) for name, part in parts.items()}}

        spread = self.replicated if jax.process_count() > 1 else None  # so that each process has all
        return jax.jit(gradients, out_shardings=spread, compiler_options=program.compiler_options(self.mesh))

    def trace(self, state: TrainState, placed: ShardedBatch) -> None:
        """Trace the loss, so that `num_draws` is known; nothing is compiled."""
        self._prepare(placed, state)

    @property
    def num_draws(self) -> int | None:
        """How many random operators a run of the loss has; None if torch cannot draw the same."""
        return self.programs[-1].num_draws

    def on_host(self, placed: ShardedBatch) -> list[torch.Tensor]:
        """The leaves of the whole batch on the CPU as torch has them, for JAX may hold 64 bits in 32.

        Every process must ask for them.
        """
        arrays = jax.jit(lambda arrays: arrays, out_shardings=self.replicated)(placed.arrays)
        return [to_cpu(array).to(spec.dtype) for array, spec in zip(arrays, placed.signature.specs, strict=True)]

    def microbatches(self, placed: ShardedBatch) -> list[PyTree]:
        """The batch, or the microbatches of it, with CPU tensors."""
        return [placed.signature.rebuild(part) for part in self._microbatches.on_host(self.on_host(placed))]


def prove(step: "TrainStep", state: TrainState, batch: PyTree, skip_grad_norm: float | None) -> Comparison:
    """Compare one step with eager torch; see `TrainStep.prove`."""
    placed = batch if isinstance(batch, ShardedBatch) else step.put(batch)
    rows, dtype = _rows(step, state, placed), precision_of(step.model, step.options.compute_dtype)
    tolerance = ROUNDING.get(dtype, 1e-4)
    if dtype == torch.float32:
        rows = told_apart(rows, tolerance, lambda: _wide(step, state, placed), functools.partial(_again, step))
    rows += _updates(step, state, placed, skip_grad_norm)
    drawn = bool(step.gradient_step.num_draws)
    reference = "eager torch" + ", which drew the random numbers of the step" * drawn
    return compared(rows, reference, step.mesh, tolerance, [row.size for row in rows if row.kind == "loss"])


def _rows(step: "TrainStep", state: TrainState, placed: ShardedBatch) -> list[Difference]:
    """Loss, metrics, gradients and buffers."""
    with _precision():
        out = step.gradient_step(state, placed)
    if step.gradient_step.num_draws is None:
        raise NotImplementedError(
            "TrainStep.prove: PyTorch decomposes a random operator of this loss, so that eager torch cannot draw the "
            "numbers of the step. Prove it without dropout (model.eval()), or use compare_with_torch, which compares "
            "one device with the mesh."
        )
    buffers = {**out["buffers"], **out["written"]}
    found = numbers_of(out["loss"], out["metrics"]) | _named("gradient", out["grads"]) | _named("buffer", buffers)
    replay = Replay(step, state, placed)
    wanted = replay.run(out["grads"])
    return differences([wanted | _named("buffer", replay.held(buffers))], None, [found])


def _named(kind: str, values: Mapping[str, jax.Array | torch.Tensor]) -> Values:
    return {(kind, name): array_of(value) for name, value in values.items()}


def _wide(step: "TrainStep", state: TrainState, placed: ShardedBatch) -> tuple[torch.nn.Module, PyTree]:
    """The model with a state, and the batch, in float64 on the CPU."""
    batch = placed.signature.rebuild(step.gradient_step.on_host(placed))
    return cpu_model(step, state).double(), in_float64(batch)


def _again(step: "TrainStep", wide: tuple[torch.nn.Module, PyTree]) -> list[Difference]:
    (model, batch), whole = wide, dataclasses.replace(step.options, local_batches=False)
    again = type(step)(model, step.loss_fn, optax.identity(), whole)  # whose gradients alone are looked at
    return _rows(again, again.init(), again.put(batch))


def _updates(
    step: "TrainStep", state: TrainState, placed: ShardedBatch, skip_grad_norm: float | None
) -> list[Difference]:
    """What the step makes of its gradients, beside optax by name: the parameters after it. None if it is skipped."""
    with _precision(), MetricCalls().noted():  # metric objects count the steps of the run alone
        out = step.gradient_step(state, placed)
        new, metrics = step(jax.tree.map(jnp.copy, state), placed, skip_grad_norm=skip_grad_norm)
    if "guard" in metrics and metrics["guard"].skipped:
        return []
    held = {**dict(state.params), **out["written"]}
    params = {name: held[name] for name in out["grads"]}
    wanted = step.update_by_name(state, out["grads"], params, out["loss"])
    grads = {n: np.abs(array_of(out["grads"][n])) for n in params if n not in step.programs[-1].without_grad}
    eps = max(float(jnp.finfo(value.dtype).eps) for value in params.values())
    least = 8 * eps * max((grad.max(initial=0) for grad in grads.values()), default=0.0)
    return [_update(n, (params[n], wanted[n], new.params[n]), grad, least) for n, grad in grads.items()]


def _precision() -> contextlib.AbstractContextManager[object]:
    """Accelerators round products of float32 by default, torch does not; a CPU need not compile again."""
    return contextlib.nullcontext() if jax.default_backend() == "cpu" else jax.default_matmul_precision("highest")


def _update(name: str, values: tuple[jax.Array, jax.Array, jax.Array], grad: np.ndarray, least: float) -> Difference:
    """How far an update is from that of optax, where its gradient is not only rounding: `least`, or less."""
    before, wanted, found = (array_of(value).astype(np.float64) for value in values)
    steps = np.abs(wanted - before)
    rounding = 4 * float(jnp.finfo(values[0].dtype).eps) * np.abs(before).max(initial=0)
    apart = np.maximum(np.abs(wanted - found) - rounding, 0)[grad > max(least, _ROUNDED * grad.max(initial=0))]
    largest = steps.max(initial=0)
    mesh = float(apart.max(initial=0) / largest) if largest else float(apart.max(initial=0))
    return Difference("update", name, float(largest), None, mesh)
