"""The gradients of a training as a program of their own: what proofs compare, and what eager torch repeats."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import nn

from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu, to_host_by_name
from torch_shard._hosts import follow
from torch_shard._loss import CALLS, program_for
from torch_shard._sharding import Stacks, constrain_stacks, with_values
from torch_shard._state import TrainState
from torch_shard._train.compiled_step import Body, CompiledStep, Task
from torch_shard._train.placing import ShardedBatch


class GradientStep(CompiledStep):
    """Loss, metrics, gradients and buffers of a train step, as a program of their own that keeps the state."""

    caller, train = "TrainStep.prove", True

    def __call__(self, state: TrainState, placed: ShardedBatch) -> dict[str, PyTree]:
        """Give them by name."""
        _, out = self._run(placed, state)
        follow(out["loss"])
        return out

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        def gradients(state: TrainState, batch: list[jax.Array], closure: list[jax.Array]) -> dict[str, PyTree]:
            out = task.run(state, batch, closure)
            grads = Stacks.from_dict(out.grads, [(name,) for name in out.grads])
            grads = constrain_stacks(grads, [self.optimizer_plan[name] for name in grads], self.layout.data_axes)
            parts = {"grads": grads, "buffers": out.buffers, "written": out.written}
            metrics = {name: value for name, value in out.metrics.items() if name != CALLS}
            return {"loss": out.loss, "metrics": metrics, **{name: dict(part) for name, part in parts.items()}}

        spread = self.replicated if jax.process_count() > 1 else None  # so that each process has all
        return gradients, {"out_shardings": spread}

    def num_draws(self, state: TrainState, placed: ShardedBatch) -> int | None:
        """How many random operators a run of the loss has; None if torch cannot draw the same. Nothing is compiled."""
        key, values = self._asked(placed, state)
        return program_for((), values, lambda number: self._capture(key, values, number)).program.graph.num_draws

    def on_host(self, placed: ShardedBatch) -> list[torch.Tensor]:
        """The leaves of the whole batch on the CPU as torch has them, for JAX may hold 64 bits in 32.

        Every process must ask for them.
        """
        arrays = jax.jit(lambda arrays: arrays, out_shardings=self.replicated)(placed.arrays)
        return [to_cpu(array).to(spec.dtype) for array, spec in zip(arrays, placed.signature.specs, strict=True)]

    def microbatches(self, placed: ShardedBatch) -> list[PyTree]:
        """The batch, or the microbatches of it, with CPU tensors."""
        return [placed.signature.rebuild(part) for part in self._microbatches.on_host(self.on_host(placed))]

    def cpu_model(self, state: TrainState) -> nn.Module:
        """The model with the values of a state on the CPU, with the training flags and gradient hooks that it has."""
        copy, model = with_values(self.model, to_host_by_name(state.tensors)), self.model
        for mine, theirs in zip(copy.modules(), model.modules(), strict=True):
            mine.training = theirs.training
        for name, parameter in model.named_parameters():
            for hook in (parameter._backward_hooks or {}).values():
                copy.get_parameter(name).register_hook(hook)  # which a copy loses
        return copy
