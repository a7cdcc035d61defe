"""Torch's optimizers as optax transformations: for chains, masks and schedules of optax, with torch's formulas."""

# optax has no stubs. JAX annotates its functions in part.
# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch

from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.types import PyTree
from torch_shard._optim.known import RULES
from torch_shard._optim.rule import Entry, Flags, Slots, read_numbers
from torch_shard._optim.stored_update import update_tensor

Rate = float | Callable[[jax.Array], Any]
"""A learning rate, or an optax schedule: of the number of steps taken, an int32 scalar."""


class TransformState(NamedTuple):
    """What a transformation keeps.

    Attributes:
        steps: Number of steps taken, int32 scalar.
        kept: Other numbers, by torch's name.
        slots: Like the parameters, a dict by torch's name for each.
    """

    steps: jax.Array
    kept: dict[str, jax.Array]
    slots: dict[str, PyTree]


def _transformation(kind: type[torch.optim.Optimizer], lr: Rate, settings: Mapping[str, Any]) -> Any:
    """The transformation of an optimizer of torch, which checks its own settings."""
    make: Any = kind
    try:
        made = make([torch.nn.Parameter(torch.zeros(1, 1))], lr=0.0 if callable(lr) else lr, **settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{kind.__name__.lower()}: {error}") from error
    group, rule = made.param_groups[0], RULES[kind]
    numbers = read_numbers(rule, group)

    def flags_for(leaves: Sequence[jax.Array]) -> Flags:
        first = [torch.empty(0, dtype=torch_dtype(leaf.dtype)) for leaf in leaves[:1]]  # whose dtype matters to torch
        return rule.flags({**group, "params": first or group["params"]})

    def init(params: PyTree) -> TransformState:
        leaves, tree = jax.tree.flatten(params)
        slots = _by_name(tree, [rule.slots(leaf, flags_for(leaves)) for leaf in leaves])
        kept = {name: jnp.asarray(value, jnp.float32) for name, value in rule.kept.items()}  # as in torch
        return TransformState(jnp.zeros((), jnp.int32), kept, slots)

    def update(grads: PyTree, state: TransformState, params: PyTree | None = None) -> tuple[PyTree, TransformState]:
        if params is None:
            raise ValueError(f"ts.optim.{kind.__name__.lower()} needs the parameters: update(grads, state, params).")
        count = state.steps + 1
        given = {name: jnp.asarray(value, float) for name, value in numbers.items()}  # float64 where JAX has it
        given["lr"] = jnp.asarray(lr(state.steps) if callable(lr) else lr, float)
        scalars, kept = rule.coefficients(count.astype(float), given, state.kept)
        own = functools.partial(update_tensor, rule, flags_for(jax.tree.leaves(params)), scalars={**given, **scalars})
        updates, slots = _updated(own, grads, params, state.slots)
        kept = {name: value.astype(jnp.float32) for name, value in kept.items()}
        return updates, TransformState(count, kept, slots)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _by_name(tree: Any, slots: Sequence[Slots]) -> dict[str, PyTree]:
    """The slots of all parameters, by their names."""
    names = dict.fromkeys(name for own in slots for name in own)
    return {n: jax.tree.unflatten(tree, [own.get(n, optax.MaskedNode()) for own in slots]) for n in names}


def _updated(
    update: Callable[[Entry], tuple[jax.Array, Slots]], grads: PyTree, params: PyTree, slots: Mapping[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """The updates, and the new slots."""
    leaves, tree = jax.tree.flatten(params)
    flat: dict[str, list[Any]] = {name: tree.flatten_up_to(values) for name, values in slots.items()}
    updates, new = list[jax.Array](), list[Slots]()
    for at, (grad, param) in enumerate(zip(tree.flatten_up_to(grads), leaves, strict=True)):
        own = {name: values[at] for name, values in flat.items() if not isinstance(values[at], optax.MaskedNode)}
        found, own = update(Entry(grad, param, own))
        updates.append(found - param)
        new.append(own)
    return jax.tree.unflatten(tree, updates), _by_name(tree, new)


_NO_FORMULA = ("params", "lr", "foreach", "capturable", "differentiable", "fused")
"""Arguments of torch's optimizers that are no settings of their formulas."""


def _factory(kind: type[torch.optim.Optimizer]) -> Callable[..., optax.GradientTransformation]:
    """The function that makes the transformation of an optimizer of torch."""
    parameters = inspect.signature(kind).parameters

    def make(lr: Rate = parameters["lr"].default, **settings: Any) -> optax.GradientTransformation:
        return _transformation(kind, lr, settings)

    make.__name__ = make.__qualname__ = name = kind.__name__.lower()
    settings = ", ".join(name for name in parameters if name not in _NO_FORMULA)
    make.__doc__ = f"""Make `torch.optim.{kind.__name__}` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.{kind.__name__}` takes them: {settings}.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import optax, torch_shard as ts
        >>> rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
        >>> optimizer = optax.chain(optax.clip(1.0), ts.optim.{name}(rate))
    """
    return make


adadelta = _factory(torch.optim.Adadelta)
adafactor = _factory(torch.optim.Adafactor)
adagrad = _factory(torch.optim.Adagrad)
adam = _factory(torch.optim.Adam)
adamax = _factory(torch.optim.Adamax)
adamw = _factory(torch.optim.AdamW)
asgd = _factory(torch.optim.ASGD)
muon = _factory(torch.optim.Muon)
nadam = _factory(torch.optim.NAdam)
radam = _factory(torch.optim.RAdam)
rmsprop = _factory(torch.optim.RMSprop)
rprop = _factory(torch.optim.Rprop)
sgd = _factory(torch.optim.SGD)
