"""What proofs compare: the gradients of a step as a program of their own, and the step repeated in eager torch."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import Precision
from torch_shard._common.types import PyTree
from torch_shard._device import JaxTensor, ReplayRNG, to_cpu, to_host_by_name
from torch_shard._entries import with_values
from torch_shard._hosts import follow
from torch_shard._loss import EFFECTS, LossProgram, program_for, split_loss
from torch_shard._sharding import Stacks, constrain_stacks
from torch_shard._state import TrainState
from torch_shard._train.comparison import Values, array_of, numbers_of
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
            metrics = {name: value for name, value in out.metrics.items() if name != EFFECTS}
            return {"loss": out.loss, "metrics": metrics, **{name: dict(part) for name, part in parts.items()}}

        spread = self.replicated if jax.process_count() > 1 else None  # so that each process has all
        return gradients, {"out_shardings": spread}

    def loss_for(self, state: TrainState, placed: ShardedBatch) -> LossProgram:
        """The loss for a batch; nothing is compiled."""
        key, values = self._asked(placed, state)
        return program_for((), values, lambda number: self._capture(key, values, number))

    def on_host(self, placed: ShardedBatch) -> list[torch.Tensor]:
        """The leaves of the whole batch on the CPU as torch has them, for JAX may hold 64 bits in 32.

        Every process must ask for them.
        """
        arrays = jax.jit(lambda arrays: arrays, out_shardings=self.replicated)(placed.arrays)
        return [to_cpu(array).to(spec.dtype) for array, spec in zip(arrays, placed.signature.specs, strict=True)]

    def microbatches(self, placed: ShardedBatch) -> list[PyTree]:
        """The batch, or the microbatches of it, with CPU tensors."""
        return [placed.signature.rebuild(part) for part in self._microbatches.on_host(self.on_host(placed))]

    def for_one_device(self, placed: ShardedBatch) -> PyTree:
        """The batch with its rows in such an order that its microbatches on one device are those here."""
        parts = zip(*self._microbatches.on_host(self.on_host(placed)), strict=True)
        return placed.signature.rebuild([torch.cat(rows) if rows[0].ndim else rows[0] for rows in parts])

    def cpu_model(self, state: TrainState) -> nn.Module:
        """The model with the values of a state on the CPU, with the training flags and gradient hooks that it has."""
        copy, model = with_values(self.model, to_host_by_name(state.tensors)), self.model
        for name, parameter in model.named_parameters():
            for hook in (parameter._backward_hooks or {}).values():
                copy.get_parameter(name).register_hook(hook)  # which a copy loses
        return copy


class Replay:
    """A step from a state, in eager torch; iterate over it for its microbatches, to run each forward and then backward.

    Gradients add up in `model`, and its buffers go from one microbatch to the next, as in the step. Every process must
    make one, and gets all of the values.
    """

    def __init__(
        self,
        step: GradientStep,
        state: TrainState,
        placed: ShardedBatch,
        *,
        precision: Precision | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self._step, self._precision = step, precision or step.options.precision
        self.model = step.cpu_model(state) if model is None else model
        self.batches: list[PyTree] = step.microbatches(placed)
        """The microbatches, with CPU tensors."""
        loss = step.loss_for(state, placed)
        self._effects = loss.captured.effects
        self.num_draws = loss.program.graph.num_draws
        """How many random operators a run of the loss has; None if torch draws other numbers than the step."""
        self._key = jax.random.fold_in(state.key, state.step)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[PyTree]:
        for number, batch in enumerate(self.batches):
            key = self._key if len(self) == 1 else jax.random.fold_in(self._key, number)
            with ReplayRNG(key if self.num_draws else None).active():
                yield batch

    def forward(self, batch: PyTree) -> tuple[torch.Tensor, dict[str, PyTree]]:
        """The loss and metrics of a microbatch."""
        with self._precision.active("cpu"), self._effects.undone(), _FromDevice():
            return split_loss(self._step.loss_fn(self.model, batch))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the part of the gradients that a microbatch has."""
        (loss / len(self)).backward()

    def held(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """These parameters and buffers of the model."""
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: held[name] for name in names}

    def run(self, trained: Iterable[str]) -> Values:
        """Run all of it, and give the loss, the metrics and the gradients of these parameters."""
        losses, metrics = list[torch.Tensor](), list[PyTree]()
        for batch in self:
            loss, found = self.forward(batch)
            self.backward(loss)
            losses.append(loss.detach())
            metrics.append(found)
        own = metrics[0] if len(self) == 1 else jax.tree.map(_together, *metrics)
        held = self.held(trained).items()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in held}
        numbers = numbers_of(torch.stack(losses).mean(), own)
        return numbers | {("gradient", name): array_of(grad) for name, grad in grads.items()}


def _together(*values: PyTree) -> torch.Tensor:
    """A metric of the microbatches as the step gives it."""
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    return stacked.mean(0) if stacked.ndim == 1 and stacked.is_floating_point() else stacked


class _FromDevice(TorchFunctionMode):
    """Lets other models of the loss, which are on the device `jax`, meet the CPU tensors of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, tuple[JaxTensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args, dict(kwargs or {})
        tensors = [leaf for leaf in torch_pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        on_device = [isinstance(tensor, JaxTensor) for tensor in tensors]
        if any(on_device) and not all(on_device):
            args, kwargs = torch_pytree.tree_map_only(JaxTensor, self._of, given)
        return func(*args, **(kwargs or {}))

    def _of(self, tensor: JaxTensor) -> torch.Tensor:
        if id(tensor) not in self._on_host:
            self._on_host[id(tensor)] = tensor, tensor.detach().to("cpu")
        return self._on_host[id(tensor)][1]
