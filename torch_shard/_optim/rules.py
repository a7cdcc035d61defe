"""Rules of torch's optimizers that treat each element by itself, by torch's own formulas (`_single_tensor_*`)."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp

from torch_shard._optim.rule import Entry, Flags, Rule, Scalars, Slots, flags_named, zeros_named


def _lerp(start: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    """As torch has it: exact at both ends."""
    return jnp.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


def _signed(grad: jax.Array, flags: Flags) -> jax.Array:
    return -grad if flags["maximize"] else grad


def _correction(t: jax.Array, n: Scalars, name: str) -> jax.Array:
    """`1 - beta ** t`."""
    return -jnp.expm1(t * n[f"log_{name}"])


def _decay(grad: jax.Array, param: jax.Array, c: Scalars, flags: Flags) -> tuple[jax.Array, jax.Array]:
    """Gradient and parameter after weight decay: of the parameter itself, or added to the gradient (L2)."""
    grad = _signed(grad, flags)
    if flags.get("decoupled_weight_decay"):
        return grad, param * (1 - c["lr"] * c["weight_decay"])
    return grad + c["weight_decay"] * param, param


# SGD


def _sgd(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    if not flags["momentum"]:
        return param - c["lr"] * grad, slots
    buffer = slots["momentum_buffer"]
    buffer = jnp.where(c["t"] == 1, grad, c["momentum"] * buffer + (1 - c["dampening"]) * grad)
    step = grad + c["momentum"] * buffer if flags["nesterov"] else buffer
    return param - c["lr"] * step, {"momentum_buffer": buffer}


def _counted(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    return {"t": t}, kept


SGD = Rule(
    numbers=("lr", "momentum", "dampening", "weight_decay"),
    flags=flags_named("maximize", "nesterov", "momentum"),
    slots=zeros_named(momentum_buffer="momentum"),
    coefficients=_counted,
    update=_sgd,
    counts=False,
)


# Adam, AdamW


def _adam_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    return {"step_size": n["lr"] / _correction(t, n, "beta1"), "root": jnp.sqrt(_correction(t, n, "beta2"))}, kept


def _moments(grad: jax.Array, slots: Slots, c: Scalars) -> tuple[jax.Array, jax.Array]:
    mean = _lerp(slots["exp_avg"], grad, c["one_minus_beta1"])
    return mean, slots["exp_avg_sq"] * c["beta2"] + c["one_minus_beta2"] * (grad * grad)


def _adam(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    mean, square = _moments(grad, slots, c)
    new, largest = {"exp_avg": mean, "exp_avg_sq": square}, square
    if flags["amsgrad"]:
        new["max_exp_avg_sq"] = largest = jnp.maximum(slots["max_exp_avg_sq"], square)
    return param - c["step_size"] * mean / (jnp.sqrt(largest) / c["root"] + c["eps"]), new


ADAM = Rule(
    numbers=("lr", "betas", "eps", "weight_decay"),
    flags=flags_named("maximize", "decoupled_weight_decay", "amsgrad"),
    slots=zeros_named("exp_avg", "exp_avg_sq", max_exp_avg_sq="amsgrad"),
    coefficients=_adam_coefficients,
    update=_adam,
)


# Adagrad, Adadelta, RMSprop


def _adagrad_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    return {"lr": n["lr"] / (1 + (t - 1) * n["lr_decay"])}, kept


def _adagrad(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    total = slots["sum"] + grad * grad
    return param - c["lr"] * grad / (jnp.sqrt(total) + c["eps"]), {"sum": total}


ADAGRAD = Rule(
    numbers=("lr", "lr_decay", "eps", "weight_decay"),
    flags=lambda group: {"maximize": bool(group["maximize"]), "start": float(group["initial_accumulator_value"])},
    slots=lambda tensor, flags: {"sum": jnp.full_like(tensor, flags["start"])},
    coefficients=_adagrad_coefficients,
    update=_adagrad,
    from_start=True,
)


def _adadelta(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    square = slots["square_avg"] * c["rho"] + c["one_minus_rho"] * (grad * grad)
    delta = jnp.sqrt(slots["acc_delta"] + c["eps"]) / jnp.sqrt(square + c["eps"]) * grad
    acc_delta = slots["acc_delta"] * c["rho"] + c["one_minus_rho"] * (delta * delta)
    return param - c["lr"] * delta, {"square_avg": square, "acc_delta": acc_delta}


ADADELTA = Rule(
    numbers=("lr", "rho", "eps", "weight_decay"), slots=zeros_named("square_avg", "acc_delta"), update=_adadelta
)


def _rmsprop(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    new = {"square_avg": (square := slots["square_avg"] * c["alpha"] + c["one_minus_alpha"] * (grad * grad))}
    if flags["centered"]:
        new["grad_avg"] = mean = _lerp(slots["grad_avg"], grad, c["one_minus_alpha"])
        square = square - mean * mean
    step = grad / (jnp.sqrt(square) + c["eps"])
    if flags["momentum"]:
        new["momentum_buffer"] = step = slots["momentum_buffer"] * c["momentum"] + step
    return param - c["lr"] * step, new


RMSPROP = Rule(
    numbers=("lr", "alpha", "eps", "weight_decay", "momentum"),
    flags=lambda group: {**flags_named("maximize", "centered")(group), "momentum": float(group["momentum"]) > 0},
    slots=zeros_named("square_avg", momentum_buffer="momentum", grad_avg="centered"),
    update=_rmsprop,
)


# Adamax, NAdam, RAdam


def _adamax_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    return {"step_size": n["lr"] / _correction(t, n, "beta1")}, kept


def _adamax(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    mean = _lerp(slots["exp_avg"], grad, c["one_minus_beta1"])
    largest = jnp.maximum(slots["exp_inf"] * c["beta2"], jnp.abs(grad) + c["eps"])
    return param - c["step_size"] * mean / largest, {"exp_avg": mean, "exp_inf": largest}


ADAMAX = Rule(
    numbers=("lr", "betas", "eps", "weight_decay"),
    slots=zeros_named("exp_avg", "exp_inf"),
    coefficients=_adamax_coefficients,
    update=_adamax,
)


def _nadam_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    def mu(t: jax.Array) -> jax.Array:
        return n["beta1"] * (1 - 0.5 * 0.96 ** (t * n["momentum_decay"]))

    product = kept["mu_product"] * mu(t)
    return {
        "of_grad": n["lr"] * (1 - mu(t)) / (1 - product),
        "of_mean": n["lr"] * mu(t + 1) / (1 - product * mu(t + 1)),
        "correction": _correction(t, n, "beta2"),
    }, {"mu_product": product}


def _nadam(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    mean, square = _moments(grad, slots, c)
    denominator = jnp.sqrt(square / c["correction"]) + c["eps"]
    param = param - c["of_grad"] * grad / denominator - c["of_mean"] * mean / denominator
    return param, {"exp_avg": mean, "exp_avg_sq": square}


NADAM = Rule(
    numbers=("lr", "betas", "eps", "weight_decay", "momentum_decay"),
    flags=flags_named("maximize", "decoupled_weight_decay"),
    slots=zeros_named("exp_avg", "exp_avg_sq"),
    coefficients=_nadam_coefficients,
    update=_nadam,
    kept={"mu_product": 1.0},
)


def _radam_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    longest = 2 / n["one_minus_beta2"] - 1
    length = _average_length(t, n["log_beta2"], longest)
    is_rectified = length > 5
    ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    root = jnp.sqrt(jnp.where(is_rectified, ratio * _correction(t, n, "beta2"), 1))
    return {"step_size": n["lr"] / _correction(t, n, "beta1"), "root": root, "is_rectified": is_rectified}, kept


def _average_length(t: jax.Array, log_beta: jax.Array, longest: jax.Array) -> jax.Array:
    """`longest - 2 * t * beta ** t / (1 - beta ** t)`; for small `t` by its series, as the terms nearly cancel."""
    x = -log_beta
    z = t * x
    series = t + ((x**2 - z**2) / 6 - (x**4 - z**4) / 360 + (x**6 - z**6) / 15120) / x
    return jnp.where(z < 0.5, series, longest - 2 * t / jnp.expm1(z))


def _radam(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    mean, square = _moments(grad, slots, c)
    scale = jnp.where(c["is_rectified"], c["root"] / (jnp.sqrt(square) + c["eps"]), 1)
    return param - c["step_size"] * mean * scale, {"exp_avg": mean, "exp_avg_sq": square}


RADAM = Rule(
    numbers=("lr", "betas", "eps", "weight_decay"),
    flags=flags_named("maximize", "decoupled_weight_decay"),
    slots=zeros_named("exp_avg", "exp_avg_sq"),
    coefficients=_radam_coefficients,
    update=_radam,
)


# ASGD, Rprop


def _asgd_coefficients(t: jax.Array, n: Scalars, kept: Scalars) -> tuple[Scalars, Scalars]:
    now = {"eta": jnp.where(t == 1, n["lr"], kept["eta"]), "mu": kept["mu"]}
    later = {
        "eta": n["lr"] / (1 + n["lambd"] * n["lr"] * t) ** n["alpha"],
        "mu": 1 / jnp.maximum(1, t - n["t0"]),
    }
    return now, later


def _asgd(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad, param = _decay(grad, param, c, flags)
    param = param * (1 - c["lambd"] * c["eta"]) - c["eta"] * grad
    average = jnp.where(c["mu"] == 1, param, slots["ax"] + (param - slots["ax"]) * c["mu"])
    return param, {"ax": average}


ASGD = Rule(
    numbers=("lr", "lambd", "alpha", "t0", "weight_decay"),
    slots=lambda tensor, flags: {"ax": jnp.copy(tensor)},  # an average of parameters
    coefficients=_asgd_coefficients,
    update=_asgd,
    kept={"eta": 0.0, "mu": 1.0},
)


def _rprop(entry: Entry, c: Scalars, flags: Flags) -> tuple[jax.Array, Slots]:
    grad, param, slots = entry
    grad = _signed(grad, flags)
    sign = jnp.sign(grad * slots["prev"])
    factor = jnp.where(sign > 0, c["etaplus"], jnp.where(sign < 0, c["etaminus"], 1))
    size = jnp.where(c["t"] == 1, c["lr"], slots["step_size"])
    size = jnp.clip(size * factor, c["smallest"], c["largest"])
    grad = jnp.where(factor == c["etaminus"], 0, grad)
    return param - jnp.sign(grad) * size, {"prev": grad, "step_size": size}


RPROP = Rule(
    numbers=("lr", "etas", "step_sizes"),
    slots=zeros_named("prev", "step_size"),
    coefficients=_counted,
    update=_rprop,
)
