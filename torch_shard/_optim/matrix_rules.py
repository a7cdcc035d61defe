"""Adafactor and Muon as torch has them: updates that look at a whole matrix (torch/optim/_adafactor.py, _muon.py)."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import math

import jax
import jax.numpy as jnp
import torch

from torch_shard._optim.rule import Entry, Flags, Rule, Scalars, Settings, Slots


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
