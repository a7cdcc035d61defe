"""Proof on the user's own run: a state and a batch through the step and through eager torch."""

# optax has no stubs. JAX and PyTorch annotate some of their functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import Sharding

from torch_shard._capture import MetricCalls
from torch_shard._common.pieces import whole
from torch_shard._common.types import PyTree
from torch_shard._hosts import follow
from torch_shard._loss import CALLS, LossProgram
from torch_shard._sharding import Stacks, constrain_stacks, describe_mesh
from torch_shard._state import TrainState
from torch_shard._train.comparison import (
    ROUNDING,
    Comparison,
    Difference,
    Values,
    array_of,
    difference_of,
    numbers_of,
)
from torch_shard._train.eager_reference import eager_gradients, host_batch, in_float64, like_model
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.replay import Replay
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
            return {"loss": out.loss, "metrics": metrics, **{name: whole(dict(part)) for name, part in parts.items()}}

        spread = self.replicated if jax.process_count() > 1 else None  # so that each process has all
        return jax.jit(gradients, out_shardings=spread, compiler_options=program.compiler_options(self.mesh))

    def trace(self, state: TrainState, placed: ShardedBatch) -> None:
        """Trace the loss, so that `num_draws` is known; nothing is compiled."""
        self._prepare(placed, state)

    @property
    def num_draws(self) -> int | None:
        """How many random operators a run of the loss has; None if torch cannot draw the same."""
        return self.programs[-1].num_draws

    def microbatches(self, placed: ShardedBatch) -> list[PyTree]:
        """The batch, or the microbatches of it, with CPU tensors as torch has them."""
        arrays = jax.jit(lambda arrays: arrays, out_shardings=self.replicated)(placed.arrays)
        parts = self._microbatches.on_host(host_batch(arrays, placed))
        return [placed.signature.rebuild(tensors) for tensors in parts]


def prove(step: "TrainStep", state: TrainState, batch: PyTree, skip_grad_norm: float | None) -> Comparison:
    """Compare one step with eager torch; see `TrainStep.prove`."""
    placed = batch if isinstance(batch, ShardedBatch) else step.put(batch)
    rows = _rows(step, state, placed)
    dtypes = {p.dtype for p in step.model.parameters()} | {step.options.compute_dtype or torch.float32}
    tolerance = max(ROUNDING.get(dtype, 1e-4) for dtype in dtypes)
    if any(not row.worst <= tolerance for row in rows) and dtypes == {torch.float32}:
        exact = in_float64(step, like_model(step.export(state), step.model), [placed], functools.partial(_again, step))
        rows = [dataclasses.replace(row, in_float64=exact.get((row.kind, row.name))) for row in rows]
    rows += _updates(step, state, placed, skip_grad_norm)
    drawn = bool(step.gradient_step.num_draws)
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: -row.worst)),
        reference="eager torch" + ", which drew the random numbers of the step" * drawn,
        mesh=f"mesh {describe_mesh(step.mesh)}",
        tolerance=tolerance,
        losses=tuple(row.size for row in rows if row.kind == "loss"),
    )


def _rows(step: "TrainStep", state: TrainState, placed: ShardedBatch) -> list[Difference]:
    """Loss, metrics, gradients and buffers."""
    with _precision():
        out = step.gradient_step(state, placed)
    found = numbers_of(out["loss"], out["metrics"])
    found |= {("gradient", name): array_of(grad) for name, grad in out["grads"].items()}
    found |= {("buffer", name): array_of(buffer) for name, buffer in {**out["buffers"], **out["written"]}.items()}
    wanted = _in_torch(step, state, placed, out)
    return [difference_of(key, [wanted], None, [found]) for key in {**wanted, **found}]


def _again(step: "TrainStep", model: torch.nn.Module, batches: list[PyTree]) -> list[Difference]:
    whole = dataclasses.replace(step.options, local_batches=False)
    wide = type(step)(model, step.loss_fn, optax.identity(), whole)  # whose gradients alone are looked at
    return _rows(wide, wide.init(), wide.put(batches[0]))


def _in_torch(step: "TrainStep", state: TrainState, placed: ShardedBatch, out: dict[str, PyTree]) -> Values:
    """The same by eager torch."""
    if step.gradient_step.num_draws is None:
        raise NotImplementedError(
            "TrainStep.prove: PyTorch decomposes a random operator of this loss, so that eager torch cannot draw the "
            "numbers of the step. Prove it without dropout (model.eval()), or use compare_with_torch, which compares "
            "one device with the mesh."
        )
    replay = Replay(step, state, placed)
    losses, metrics = list[torch.Tensor](), list[PyTree]()
    for run in replay:
        loss, found = run.forward()
        run.backward(loss)
        losses.append(loss.detach())
        metrics.append(found)
    model, own = replay.model, metrics[0] if len(replay) == 1 else jax.tree.map(together, *metrics)
    wanted = numbers_of(torch.stack(losses).mean(), own) | eager_gradients(model, out["grads"])
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return wanted | {("buffer", name): array_of(held[name]) for name in (*out["buffers"], *out["written"])}


def together(*values: PyTree) -> torch.Tensor:
    """A metric of the microbatches as the step gives it."""
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    return stacked.mean(0) if stacked.ndim == 1 and stacked.is_floating_point() else stacked


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
