"""Torch's optimizers as optax transformations: for chains, masks and schedules of optax, with torch's formulas."""

# optax has no stubs. JAX annotates its functions in part.
# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch

from torch_shard._common.caller import caller, public
from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.types import PyTree
from torch_shard._optim.from_torch import RULES
from torch_shard._optim.rule import Entry, Flags, Rule, Slots, read_numbers
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
        raise type(error)(f"{caller()}: {error}") from error
    group, rule = made.param_groups[0], RULES[kind]
    numbers = read_numbers(rule, group)

    def flags_for(leaves: Sequence[jax.Array]) -> Flags:
        first = [torch.empty(0, dtype=torch_dtype(leaf.dtype)) for leaf in leaves[:1]]  # whose dtype matters to torch
        return rule.flags({**group, "params": first or group["params"]})

    def init(params: PyTree) -> TransformState:
        leaves, tree = jax.tree.flatten(params)
        slots = [_slots(rule, leaf, flags_for(leaves)) for leaf in leaves]
        names = dict.fromkeys(name for own in slots for name in own)
        by_name = {n: jax.tree.unflatten(tree, [own.get(n, optax.MaskedNode()) for own in slots]) for n in names}
        kept = {name: jnp.asarray(value, jnp.float32) for name, value in rule.kept.items()}  # as in torch
        return TransformState(jnp.zeros((), jnp.int32), kept, by_name)

    def update(grads: PyTree, state: TransformState, params: PyTree | None = None) -> tuple[PyTree, TransformState]:
        if params is None:
            raise ValueError(f"ts.optim.{kind.__name__.lower()} needs the parameters: update(grads, state, params).")
        count = state.steps + 1
        given = {name: jnp.asarray(value, float) for name, value in numbers.items()}  # float64 where JAX has it
        given["lr"] = jnp.asarray(lr(state.steps) if callable(lr) else lr, float)
        scalars, kept = rule.coefficients(count.astype(float), given, state.kept)
        own = functools.partial(update_tensor, rule, flags_for(jax.tree.leaves(params)), scalars=scalars)
        updates, slots = _updated(own, grads, params, state.slots)
        kept = {name: value.astype(jnp.float32) for name, value in kept.items()}
        return updates, TransformState(count, kept, slots)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _slots(rule: Rule, leaf: jax.Array, flags: Mapping[str, Any]) -> Slots:
    if why := rule.refuses(leaf.shape):
        raise ValueError(f"a parameter of shape {leaf.shape}: {why} (optax.partition, by name).")
    return rule.slots(leaf, flags)


def _updated(
    update: Callable[[Entry], tuple[jax.Array, Slots]], grads: PyTree, params: PyTree, slots: Mapping[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """The updates, and the new slots."""
    leaves, tree = jax.tree.flatten(params)
    flat: dict[str, list[Any]] = {name: tree.flatten_up_to(values) for name, values in slots.items()}
    updates, new = list[jax.Array](), {name: list(values) for name, values in flat.items()}
    for at, (grad, param) in enumerate(zip(tree.flatten_up_to(grads), leaves, strict=True)):
        own = {name: values[at] for name, values in flat.items() if not isinstance(values[at], optax.MaskedNode)}
        found, own = update(Entry(grad, param, own))
        updates.append(found - param)
        for name, value in own.items():
            new[name][at] = value
    return jax.tree.unflatten(tree, updates), {n: jax.tree.unflatten(tree, values) for n, values in new.items()}


@public
def adadelta(lr: Rate = 1.0, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Adadelta` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Adadelta` takes them: rho, eps, weight_decay, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.adadelta(1e-2, rho=0.8)
    """
    return _transformation(torch.optim.Adadelta, lr, settings)


@public
def adafactor(lr: Rate = 0.01, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Adafactor` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Adafactor` takes them: beta2_decay, eps, d, weight_decay, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.adafactor(1e-2, weight_decay=0.1)
    """
    return _transformation(torch.optim.Adafactor, lr, settings)


@public
def adagrad(lr: Rate = 0.01, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Adagrad` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Adagrad` takes them:
            lr_decay, weight_decay, initial_accumulator_value, eps, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.adagrad(1e-2, lr_decay=0.01)
    """
    return _transformation(torch.optim.Adagrad, lr, settings)


@public
def adam(lr: Rate = 0.001, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Adam` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Adam` takes them:
            betas, eps, weight_decay (added to the gradient: L2), amsgrad, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.adam(1e-2, amsgrad=True)
    """
    return _transformation(torch.optim.Adam, lr, settings)


@public
def adamax(lr: Rate = 0.002, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Adamax` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Adamax` takes them: betas, eps, weight_decay, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.adamax(1e-2, eps=1e-6)
    """
    return _transformation(torch.optim.Adamax, lr, settings)


@public
def adamw(lr: Rate = 0.001, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.AdamW` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.AdamW` takes them: betas, eps, weight_decay, amsgrad, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import optax, torch_shard as ts
        >>> rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
        >>> optimizer = optax.chain(optax.clip(1.0), ts.optim.adamw(rate, weight_decay=0.1))
    """
    return _transformation(torch.optim.AdamW, lr, settings)


@public
def asgd(lr: Rate = 0.01, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.ASGD` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.ASGD` takes them: lambd, alpha, t0, weight_decay, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.asgd(1e-2, t0=1000)
    """
    return _transformation(torch.optim.ASGD, lr, settings)


@public
def muon(lr: Rate = 0.001, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Muon` an optax transformation, with torch's formula and defaults. Matrices alone.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Muon` takes them:
            weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.muon(1e-2, momentum=0.9)
    """
    return _transformation(torch.optim.Muon, lr, settings)


@public
def nadam(lr: Rate = 0.002, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.NAdam` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.NAdam` takes them:
            betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.nadam(1e-2, momentum_decay=0.01)
    """
    return _transformation(torch.optim.NAdam, lr, settings)


@public
def radam(lr: Rate = 0.001, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.RAdam` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.RAdam` takes them: betas, eps, weight_decay, decoupled_weight_decay, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.radam(1e-2, decoupled_weight_decay=True)
    """
    return _transformation(torch.optim.RAdam, lr, settings)


@public
def rmsprop(lr: Rate = 0.01, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.RMSprop` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.RMSprop` takes them: alpha, eps, weight_decay, momentum, centered, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.rmsprop(1e-2, alpha=0.9, momentum=0.9)
    """
    return _transformation(torch.optim.RMSprop, lr, settings)


@public
def rprop(lr: Rate = 0.01, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.Rprop` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.Rprop` takes them: etas, step_sizes, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.rprop(1e-2, etas=(0.6, 1.3))
    """
    return _transformation(torch.optim.Rprop, lr, settings)


@public
def sgd(lr: Rate = 0.001, **settings: Any) -> optax.GradientTransformation:
    """Make `torch.optim.SGD` an optax transformation, with torch's formula and defaults.

    Args:
        lr: Learning rate, or an optax schedule.
        **settings: As `torch.optim.SGD` takes them: momentum, dampening, weight_decay, nesterov, maximize.

    Raises:
        TypeError: Torch has no such setting.
        ValueError: Torch refuses a value.

    Example:
        >>> import torch_shard as ts
        >>> optimizer = ts.optim.sgd(1e-2, momentum=0.9, nesterov=True)
    """
    return _transformation(torch.optim.SGD, lr, settings)
