"""The place where a bad step stopped being finite: its batch is repeated in eager torch, and each call looked at."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import current_user_line
from torch_shard._common.types import PyTree
from torch_shard._device import ReplayRNG
from torch_shard._state import TrainState
from torch_shard._train import ShardedBatch, TrainStep, eager_loss, like_model

logger = logging.getLogger(__name__)

_MOST_WORK = 1e12
"""Parameters times numbers of a batch: more would take eager torch on a CPU minutes."""

_UNKNOWN = "Where it began is not known"


def first_non_finite(step: TrainStep, placed: ShardedBatch, state: TrainState) -> str:
    """Say where the first value that is not finite came from, or that it is not known; one sentence.

    Args:
        step: That was not taken.
        placed: Its batch.
        state: As it was before the step.
    """
    work = sum(p.numel() for p in step.model.parameters()) * sum(math.prod(array.shape) for array in placed.arrays)
    if jax.process_count() > 1 or work > _MOST_WORK:
        return f"{_UNKNOWN}: repeating the batch in eager torch would take long"
    try:
        return _repeat(step, placed, state)
    except Exception:
        logger.info("fit: the batch of a bad step cannot be repeated in eager torch.", exc_info=True)
        return f"{_UNKNOWN}: the batch cannot be repeated in eager torch"


def _repeat(step: TrainStep, placed: ShardedBatch, state: TrainState) -> str:
    model, parts = like_model(step.export(state), step.model), step.gradient_step.microbatches(placed)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    spoiled = [name for name, tensor in held.items() if name in state.params and not _is_finite(tensor)]
    key = jax.random.fold_in(state.key, state.step)
    for number, part in enumerate(parts):
        own = key if len(parts) == 1 else jax.random.fold_in(key, number)
        look = _Look(model)
        with ReplayRNG(own if step.draws_random else None).active(), look.active():
            loss, _ = eager_loss(step, model, part)
            if is_fine := bool(torch.isfinite(loss)):
                loss.backward()
        if found := look.gradient if is_fine else ". ".join(look.results.values()):
            return found
        if spoiled:
            return f"Before the batch, {', '.join(spoiled[:4])} of the state had values that are not finite"
        if not all(map(_is_finite, _tensors(part))):
            return "The batch itself has values that are not finite"
    return f"{_UNKNOWN}: in eager torch on the CPU all values of this batch are finite"


class _Look(TorchFunctionMode):
    """Looks for the first call of torch that makes NaN or infinity of what had none, forward or backward.

    Args:
        model: In whose modules it is looked for.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._seen: set[Any] = set()
        self.results: dict[str, str] = {}
        """Of infinity and NaN, where each was first a result, as sentences."""
        self.gradient = ""
        """Where a gradient was first not finite."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Look at the calls within, and at their derivatives later."""
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append(self._names.get(id(module), "") or type(module).__name__)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        given = (args, kwargs or {})
        if not _tensors(given) or getattr(func, "__name__", "") in ("__get__", "backward"):
            return func(*args, **(kwargs or {}))
        had_nan, was_finite = any(map(_has_nan, _tensors(given))), all(map(_is_finite, _tensors(given)))
        asks = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in torch_pytree.tree_leaves(given))
        out = func(*args, **(kwargs or {}))
        place, made = self._place(func), _tensors(out)
        has_nan = any(map(_has_nan, made))
        if has_nan and not had_nan:
            self.results.setdefault("NaN", f"The first NaN is a result of {place}")
        elif was_finite and not asks and not all(map(_is_finite, made)):  # minus infinity in a mask is asked for
            self.results.setdefault("infinity", f"The first infinity is a result of {place}")
        for tensor in made:
            self._watch(tensor.grad_fn, place)
        return out

    def _place(self, func: Callable[..., Any]) -> str:
        path = self._running[-1] if self._running else "loss_fn"
        return f"{getattr(func, '__name__', 'a call')} in {path} ({current_user_line()})"

    def _watch(self, node: Any, place: str) -> None:
        """Look at the derivatives of a call: its node of autograd, and those behind it that no call before had."""
        if node is None or node in self._seen:
            return
        self._seen.add(node)

        def look(grads: Any, cotangents: Any) -> None:
            was_finite = all(map(_is_finite, _tensors(cotangents)))
            if not self.gradient and was_finite and not all(map(_is_finite, _tensors(grads))):
                self.gradient = f"The first value that is not finite is in the gradient of {place}"

        if not hasattr(node, "variable"):
            node.register_hook(look)
            for behind, _ in node.next_functions:
                self._watch(behind, place)


def _tensors(values: PyTree) -> list[torch.Tensor]:
    return [t for t in torch_pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _has_nan(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    with torch._C.DisableTorchFunction():
        return is_number and tensor.numel() > 0 and bool(tensor.detach().isnan().any())


def _is_finite(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(tensor.detach().isfinite().all())
