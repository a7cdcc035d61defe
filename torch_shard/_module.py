"""What a module holds, by name: trainable and frozen parameters, buffers, ties; and how to run it with others."""

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

LossFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Holdings:
    """The tensors of a module by `state_dict` name, each once: a tie goes by the first of its names."""

    trainable: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Trainable and frozen parameters."""
        return {**self.trainable, **self.frozen}

    @property
    def all(self) -> dict[str, torch.Tensor]:
        """Every tensor, in the order trainable, frozen, buffers."""
        return {**self.params, **self.buffers}


def holdings(module: nn.Module) -> Holdings:
    """The parameters and buffers of a module (non-persistent buffers too)."""
    params = dict(module.named_parameters())
    return Holdings(
        trainable={name: p for name, p in params.items() if p.requires_grad},
        frozen={name: p for name, p in params.items() if not p.requires_grad},
        buffers=dict(module.named_buffers()),
    )


def training_flags(modules: list[nn.Module]) -> tuple[bool, ...]:
    """The training flag of each module."""
    return tuple(module.training for module in modules)


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """The module in eval mode; each submodule gets its own flag back."""
    flags = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


class _WithLoss(nn.Module):
    """A module and its loss as one module, so that `torch.func.functional_call` can swap the tensors of both."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """The loss, and the buffers as they are after it."""
        return self.loss_fn(self.model, batch), dict(self.model.named_buffers())


def call_with(
    module: nn.Module, loss_fn: LossFn, tensors: Mapping[str, torch.Tensor], batch: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run `loss_fn(module, batch)` with other tensors in the places of the module's own.

    Args:
        module: Left as it was.
        loss_fn: The user's loss.
        tensors: By the names of `holdings`; every name of a tie gets the one tensor.
        batch: What `loss_fn` takes.

    Returns:
        What `loss_fn` returns, and the buffers after it, written or reassigned.
    """
    with _attributes_restored(module):
        swapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return torch.func.functional_call(_WithLoss(module, loss_fn), swapped, (batch,), tie_weights=True)


@contextlib.contextmanager
def _attributes_restored(module: nn.Module) -> Iterator[None]:
    """Take back what forward wrote to plain attributes: in a compiled step it would happen once, not per step."""
    before = {name: dict(vars(m)) for name, m in module.named_modules()}
    try:
        yield
    finally:
        for name, m in module.named_modules():
            old = before.get(name, {})
            for attribute in [a for a, value in vars(m).items() if a not in old or value is not old[a]]:
                where = f"{name}.{attribute}" if name else attribute
                logger.warning(
                    "forward writes the plain attribute %s; a compiled step does not keep such writes. Return the "
                    "value in the metrics, or register a buffer.",
                    where,
                )
                if attribute in old:
                    vars(m)[attribute] = old[attribute]
                else:
                    del vars(m)[attribute]


def with_values(module: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """A deep copy of a module that holds other values.

    Args:
        module: Left as it is; its tensors are not copied.
        values: One tensor for each name of `holdings`; ties and `requires_grad` are the module's.
    """
    memo: dict[int, Any] = {}
    for name, tensor in holdings(module).all.items():
        value = values[name]
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_param else value
    return copy.deepcopy(module, memo)


def replace_tensors(module: nn.Module, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Put `value` wherever `module` holds `tensor`, under all names of a tie.

    Args:
        module: Changed in place.
        tensor: A parameter or buffer of the module.
        value: The new tensor; a parameter stays a parameter with its `requires_grad`.
    """
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    for m in module.modules():
        for held in (m._parameters, m._buffers):
            for key in [key for key, found in held.items() if found is tensor]:
                held[key] = value  # pyright: ignore[reportArgumentType]
