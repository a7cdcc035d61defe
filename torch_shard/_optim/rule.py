"""The update of one tensor by each optimizer of torch, by torch's own formulas (torch/optim/*.py, `_single_tensor_*`).

A rule is pure JAX. What a parameter group says in numbers (`lr`, `betas`, ...) is an input of the program; what it says
in flags (`amsgrad`, `nesterov`, ...) is fixed. `1 - beta` and `log(beta)` come in as numbers of their own, as they are
made in double precision: `1 - beta ** step` then has all the digits of float32.
"""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

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


# Adafactor and Muon as torch has them: updates that look at a whole matrix (torch/optim/_adafactor.py, _muon.py).


def _adafactor_flags(group: Settings) -> Flags:
    eps1 = group["eps"][0]
    if eps1 is None:  # torch then takes that of the first parameter for all of its group
        eps1 = torch.finfo(group["params"][0].dtype).eps
    return {"maximize": bool(group["maximize"]), "eps1": float(eps1)}


def _adafactor_slots(tensor: jax.Array, flags: Flags) -> Slots:
    if tensor.ndim < 2:
        return {"variance": jnp.zeros_like(tensor)}
    *outer, rows, columns = tensor.shape
    return {
        "row_var": jnp.zeros((*outer, rows, 1), tensor.dtype),
        "col_var": jnp.zeros((*outer, 1, columns), tensor.dtype),
    }


def _adafactor_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    return {"rho": jnp.minimum(n["lr"], 1 / jnp.sqrt(t)), "weight": t ** n["beta2_decay"]}, kept


def _root_mean_square(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x)) / math.sqrt(x.size)


def _adafactor(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad = -grad if flags["maximize"] else grad
    eps1 = flags["eps1"]
    alpha = jnp.maximum(c["eps2"], _root_mean_square(param)) * c["rho"]
    param = param * (1 - c["lr"] * c["weight_decay"])

    def moved(slot: str, value: jax.Array) -> jax.Array:
        return slots[slot] + c["weight"] * (value - slots[slot])

    square = grad * grad
    if grad.ndim > 1:
        row, column = moved("row_var", square.mean(-1, keepdims=True)), moved("col_var", square.mean(-2, keepdims=True))
        new = {"row_var": row, "col_var": column}
        variance = row * column / jnp.maximum(row.mean(-2, keepdims=True), eps1)
    else:
        variance = moved("variance", square)
        new = {"variance": variance}
    update = grad * jax.lax.rsqrt(jnp.maximum(variance, eps1 * eps1))
    return param - alpha / jnp.maximum(1, _root_mean_square(update) / c["d"]) * update, new


ADAFACTOR = Rule(
    numbers=("lr", "beta2_decay", "weight_decay", "eps2", "d"),
    flags=_adafactor_flags,
    slots=_adafactor_slots,
    coefficients=_adafactor_coefficients,
    update=_adafactor,
    by_element=False,
)


def _muon_flags(group: Settings) -> Flags:
    return {
        "nesterov": bool(group["nesterov"]),
        "coefficients": tuple(map(float, group["ns_coefficients"])),
        "steps": int(group["ns_steps"]),
        "eps": float(group["eps"]),
        "adjust": group["adjust_lr_fn"],
    }


def _orthogonal(matrix: jax.Array, flags: Flags) -> jax.Array:
    """By the Newton-Schulz iteration, in bfloat16 as in torch."""
    a, b, c = flags["coefficients"]
    x = matrix.astype(jnp.bfloat16)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)))).astype(jnp.bfloat16)
    x = x / jnp.maximum(norm, jnp.bfloat16(flags["eps"]))

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    for _ in range(flags["steps"]):
        gram = product(x, x.T).astype(jnp.bfloat16)
        change = (b * gram.astype(jnp.float32) + c * product(gram, gram)).astype(jnp.bfloat16)
        x = (a * x.astype(jnp.float32) + product(change, x)).astype(jnp.bfloat16)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _muon(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    buffer = slots["momentum_buffer"]
    buffer = buffer + c["one_minus_momentum"] * (grad - buffer)
    step = grad + c["momentum"] * (buffer - grad) if flags["nesterov"] else buffer
    step = _orthogonal(step, flags).astype(param.dtype)
    rows, columns = param.shape
    ratio = 1.0
    if flags["adjust"] in (None, "original"):
        ratio = math.sqrt(max(1, rows / columns))
    elif flags["adjust"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    param = param * (1 - c["lr"] * c["weight_decay"])
    return param - c["lr"] * ratio * step, {"momentum_buffer": buffer}


def _muon_slots(tensor: jax.Array, flags: Flags) -> Slots:
    if tensor.ndim != 2:  # which torch refuses, but a transformation of optax is given any
        raise ValueError(
            f"a parameter of shape {tensor.shape}: Muon takes matrices alone; give the others to another optimizer "
            "(optax.partition, by name)."
        )
    return {"momentum_buffer": jnp.zeros_like(tensor)}


MUON = Rule(
    numbers=("lr", "weight_decay", "momentum"),
    flags=_muon_flags,
    slots=_muon_slots,
    update=_muon,
    counts=False,
    by_element=False,
    rounding=2**-8,
)
