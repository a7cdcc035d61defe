"""The update of one tensor by each optimizer of torch, by torch's own formulas (torch/optim/*.py, `_single_tensor_*`).

A rule is pure JAX. What a parameter group says in numbers (`lr`, `betas`, ...) is an input of the program; what it says
in flags (`amsgrad`, `nesterov`, ...) is fixed. `1 - beta` and `log(beta)` come in as numbers of their own, as they are
made in double precision: `1 - beta ** step` then has all the digits of float32.
"""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Scalars = Mapping[str, jax.Array]
"""Numbers of one group, by name, each of shape `()`."""
Slots = dict[str, jax.Array]
"""What is kept for one tensor, by torch's name for it."""


class Entry(NamedTuple):
    """One tensor at a step.

    Attributes:
        grad: Its gradient.
        param: The tensor.
        slots: What is kept for it.
    """

    grad: jax.Array
    param: jax.Array
    slots: Slots


Flags = Mapping[str, Any]
Settings = Mapping[str, Any]
"""One of `optimizer.param_groups`."""


def flags_named(*names: str) -> Callable[[Settings], Flags]:
    """Flags that are true or false, as torch names them; of numbers, whether they are not 0."""
    return lambda group: {name: bool(group[name]) for name in names}


_MAXIMIZE = flags_named("maximize")


def zeros_named(*names: str, **asked: str) -> Callable[[jax.Array, Flags], Slots]:
    """Slots like the tensor that begin as zeros: by name, and by name those for which a flag asks."""

    def slots(tensor: jax.Array, flags: Flags) -> Slots:
        wanted = [*names, *(name for name, flag in asked.items() if flags[flag])]
        return {name: jnp.zeros_like(tensor) for name in wanted}

    return slots


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer of torch.

    Attributes:
        numbers: Which numbers of a group are inputs, as torch names them.
        flags: What of a group is fixed once a program is compiled.
        slots: Names and initial values of what is kept for a tensor: `(tensor, flags) -> slots`.
        coefficients: Scalars at step `t` (the first is 1) beside the numbers, or in place of some:
            `(t, numbers, kept) -> (scalars, kept)`.
        update: `(entry, numbers and coefficients, flags) -> (param, slots)` of one tensor.
        kept: Scalars that a group keeps from step to step, with their initial values.
        counts: Whether torch keeps a `step` for each parameter.
        from_start: Whether torch keeps a state before the first step.
        by_element: Whether every element goes by itself.
        rounding: Of its own arithmetic, where that is narrower than float32: relative.
    """

    numbers: tuple[str, ...]
    slots: Callable[[jax.Array, Flags], Slots]
    update: Callable[[Entry, Scalars, Flags], tuple[jax.Array, Slots]]
    coefficients: Callable[[jax.Array, Scalars, Scalars], tuple[Scalars, Scalars]] = lambda t, n, kept: ({}, kept)
    flags: Callable[[Settings], Flags] = _MAXIMIZE
    kept: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    counts: bool = True
    from_start: bool = False
    by_element: bool = True
    rounding: float = 0.0


def read_numbers(rule: Rule, group: Settings) -> dict[str, float]:
    """The numbers of a group that a program is given, in double precision.

    Args:
        rule: Of its optimizer.
        group: Of `optimizer.param_groups`.
    """
    found: dict[str, float] = {}
    for name in rule.numbers:
        if name in _PAIRS:
            for part, value in zip(_PAIRS[name], group[name], strict=True):
                found |= _number(part, value)
        else:
            found |= _number(name, group["eps"][1] if name == "eps2" else group[name])
    return found


def _number(name: str, value: Any) -> dict[str, float]:
    number = float(value)
    if name not in _DECAYS:
        return {name: number}
    log = math.log(number) if number > 0 else -math.inf
    return {name: number, f"one_minus_{name}": 1 - number, f"log_{name}": log}


_PAIRS = {"betas": ("beta1", "beta2"), "etas": ("etaminus", "etaplus"), "step_sizes": ("smallest", "largest")}
_DECAYS = ("beta1", "beta2", "rho", "alpha", "momentum")
