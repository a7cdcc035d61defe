"""One step repeated in eager torch on the CPU, the reference of all proofs: state, microbatches and random numbers."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

import jax
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import MetricCalls, Precision
from torch_shard._common.types import PyTree
from torch_shard._device import ReplayRNG
from torch_shard._loss import split_loss
from torch_shard._lowering import world_of_one
from torch_shard._state import TrainState
from torch_shard._train.comparison import Values, array_of, numbers_of
from torch_shard._train.gradient_step import GradientStep
from torch_shard._train.placing import ShardedBatch


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
        self.num_draws = step.num_draws(state, placed)
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
        with self._precision.active("cpu"), MetricCalls().noted(), world_of_one():
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


class ModuleCalls:
    """Follows the modules of a model while they run: which one is running, and what each returns."""

    def __init__(self, model: nn.Module, left: Callable[[str, str, list[torch.Tensor]], None]) -> None:
        named = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
        self._names = {id(module): name for name, module in named}
        self._running, self._left = list[str](), left

    @property
    def current(self) -> str:
        """The innermost module that is running."""
        return self._running[-1] if self._running else "loss_fn"

    @contextlib.contextmanager
    def active(self) -> Generator[None, None, None]:
        """Follow them within."""
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append(self._names.get(id(module), "") or type(module).__name__)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._left(self._running.pop(), type(module).__name__, tensors_of(output))


def tensors_of(values: PyTree) -> list[torch.Tensor]:
    """The tensors in a pytree."""
    return [leaf for leaf in torch_pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """The entries of a tensor as a plain tensor of floating point; None of integers, and of what cannot be read."""
    from_torch: Any = tensor.detach()
    if not (from_torch.is_floating_point() or from_torch.is_complex()) or from_torch.is_meta:
        return None
    try:
        if from_torch.is_nested or from_torch.layout is not torch.strided:
            from_torch = from_torch.coalesce() if from_torch.layout is torch.sparse_coo else from_torch
            from_torch = from_torch.values()
        from_torch = from_torch.float() if from_torch.dtype.itemsize == 1 else from_torch
        from_torch.isfinite().all().item()  # refused within torch.vmap, where a tensor stands for many
    except RuntimeError:
        return None
    return from_torch if from_torch.numel() else None


def _together(*values: PyTree) -> torch.Tensor:
    """A metric of the microbatches as the step gives it."""
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    return stacked.mean(0) if stacked.ndim == 1 and stacked.is_floating_point() else stacked
