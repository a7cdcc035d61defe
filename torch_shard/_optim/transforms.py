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

        settings = {name: jnp.asarray(value, float) for name, value in numbers.items()}  # float64 where JAX has it
        settings["lr"] = jnp.asarray(lr(state.steps) if callable(lr) else lr, float)
        scalars, new_numbers = rule.coefficients(count.astype(float), settings, state.kept)

        flags = flags_for(jax.tree.leaves(params))
        update_leaf = functools.partial(update_tensor, rule, flags, scalars={**settings, **scalars})
        updates, slots = _updated(update_leaf, grads, params, state.slots)
        new_numbers = {name: value.astype(jnp.float32) for name, value in new_numbers.items()}
        return updates, TransformState(count, new_numbers, slots)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _by_name(tree: Any, slots: Sequence[Slots]) -> dict[str, PyTree]:
    """The slots of all parameters, by their names."""
    names: dict[str, None] = {}
    for of_leaf in slots:
        names |= dict.fromkeys(of_leaf)

    # Adafactor keeps other slots for a vector than for a matrix: optax's sign for "nothing" is a masked node.
    by_name: dict[str, PyTree] = {}
    for name in names:
        values = [of_leaf.get(name, optax.MaskedNode()) for of_leaf in slots]
        by_name[name] = jax.tree.unflatten(tree, values)
    return by_name


def _updated(
    update: Callable[[Entry], tuple[jax.Array, Slots]], grads: PyTree, params: PyTree, slots: Mapping[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """The updates, and the new slots."""
    leaves, tree = jax.tree.flatten(params)
    flat_slots: dict[str, list[Any]] = {name: tree.flatten_up_to(values) for name, values in slots.items()}

    updates: list[jax.Array] = []
    new_slots: list[Slots] = []
    for number, (grad, param) in enumerate(zip(tree.flatten_up_to(grads), leaves, strict=True)):
        leaf_slots: Slots = {}
        for name, values in flat_slots.items():
            if not isinstance(values[number], optax.MaskedNode):
                leaf_slots[name] = values[number]

        new_param, leaf_slots = update(Entry(grad, param, leaf_slots))
        updates.append(new_param - param)
        new_slots.append(leaf_slots)
    return jax.tree.unflatten(tree, updates), _by_name(tree, new_slots)


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
