"""Special functions and orthogonal polynomials."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.scipy import special

from torch_shard._common.axes import vary_like
from torch_shard._common.dtypes import jax_dtype, numbers_of
from torch_shard._lowering.ops.registry import foreign_lowering, in_float32, lowers

aten, prims = torch.ops.aten, torch.ops.prims


def _floating(x):
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _of_floats(fn):
    return lambda x: fn(_floating(x))


for _op, _fn in {
    aten.sigmoid: jax.nn.sigmoid,
    aten.erf: jax.lax.erf,
    aten.erfc: jax.lax.erfc,
    aten.erfinv: jax.lax.erf_inv,
    aten.rsqrt: jax.lax.rsqrt,
    aten.lgamma: jax.lax.lgamma,
}.items():
    lowers(_op.default)(_of_floats(_fn))


@lowers(aten.complex.default)
def complex_(real, imag):
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


def _times_log(log):
    """`x * log(y)`, and 0 where x is; of a number and integers PyTorch's rule makes an integer of the number."""

    def lowered(x, y):
        x, y = jnp.asarray(x), _floating(jnp.asarray(y))
        return jnp.where(jnp.isnan(y), jnp.nan, jnp.where(x == 0, 0, x * log(y)))

    return lowered


lowers(aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)(_times_log(jnp.log))
lowers(aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar)(_times_log(jnp.log1p))


@lowers(aten.sign.default)
def sign(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(x != x, 0, jnp.sign(x))
    return x if x.dtype == bool else jnp.sign(x)


@lowers(aten.angle.default)
def angle(x):
    x = _floating(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.arctan2(x.imag, x.real)
    return jnp.where(x != x, x, jnp.where(x < 0, np.asarray(np.pi, x.dtype), 0))


@lowers(aten.digamma.default, prims.digamma.default)
def digamma(x):
    """At zero it has the infinity of the side that zero's sign tells; at the other poles NaN."""
    x = _floating(x)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jax.lax.digamma(x))


@lowers(aten.polygamma.default)
def polygamma(n, x):
    x = _floating(x)
    if n == 0:
        return digamma(x)
    if n == 1:
        return _trigamma(x)
    factor = float(np.prod(np.arange(1.0, n + 1))) * (-1) ** (n + 1)
    return np.asarray(factor, x.dtype) * zeta(jnp.asarray(n + 1, x.dtype), x)


@lowers(aten.special_zeta.default, aten.special_zeta.other_scalar, aten.special_zeta.self_scalar)
def zeta(x, q):
    """JAX's sum holds for positive q: below, the first terms are added one by one, for whole powers."""
    x, q = jnp.broadcast_arrays(_floating(jnp.asarray(x)), _floating(jnp.asarray(q)))
    below = (q < 0) & (q != jnp.floor(q)) & (x == jnp.floor(x))
    count = jnp.where(below, jnp.ceil(-q), 0)

    def add_term(k, total):
        return total + jnp.where(k < count, jnp.where(below, q + k, 1) ** -x, 0)

    head = jax.lax.fori_loop(
        0, jnp.max(count, initial=0).astype(jnp.int32), add_term, vary_like(jnp.zeros_like(q), x, count)
    )
    return head + special.zeta(x, q + count)


def _trigamma(x):
    reflected = x < 0.5
    sine = jnp.sin(np.pi * (x - jnp.round(x)))
    series = special.zeta(jnp.asarray(2, x.dtype), jnp.where(reflected, 1 - x, x))
    return jnp.where(reflected, np.pi**2 / jnp.square(sine) - series, series).astype(x.dtype)


def _recurrence(first, following):
    """Polynomials by degree: 1, `first(x)`, then `following(k, x, p[k], p[k - 1])`; 0 below degree 0."""

    def evaluate(x, n):
        x, n = jnp.broadcast_arrays(_floating(jnp.asarray(x)), jnp.asarray(n))
        n = jnp.trunc(n).astype(jnp.int32)

        def step(k, state):
            before, now = state
            return jnp.where(k < n, now, before), jnp.where(k < n, following(k, x, now, before), now)

        start = (jnp.ones_like(x), jnp.asarray(first(x), x.dtype))
        _, highest = jax.lax.fori_loop(1, jnp.max(n, initial=1), step, vary_like(start, x, n))
        return jnp.where(n < 0, 0, jnp.where(n == 0, 1, highest)).astype(x.dtype)

    return evaluate


def _chebyshev(first):
    return _recurrence(first, lambda k, x, now, before: 2 * x * now - before)


def _shifted(evaluate):
    return lambda x, n: evaluate(2 * _floating(jnp.asarray(x)) - 1, n)


_KINDS = {
    "t": _chebyshev(lambda x: x),
    "u": _chebyshev(lambda x: 2 * x),
    "v": _chebyshev(lambda x: 2 * x - 1),
    "w": _chebyshev(lambda x: 2 * x + 1),
}

_POLYNOMIALS = {
    **{f"special_chebyshev_polynomial_{kind}": fn for kind, fn in _KINDS.items()},
    **{f"special_shifted_chebyshev_polynomial_{kind}": _shifted(fn) for kind, fn in _KINDS.items()},
    "special_hermite_polynomial_h": _recurrence(lambda x: 2 * x, lambda k, x, p, q: 2 * (x * p - k * q)),
    "special_hermite_polynomial_he": _recurrence(lambda x: x, lambda k, x, p, q: x * p - k * q),
    "special_laguerre_polynomial_l": _recurrence(
        lambda x: 1 - x, lambda k, x, p, q: ((2 * k + 1 - x) * p - k * q) / (k + 1)
    ),
    "special_legendre_polynomial_p": _recurrence(
        lambda x: x, lambda k, x, p, q: ((2 * k + 1) * x * p - k * q) / (k + 1)
    ),
}

for _name, _fn in _POLYNOMIALS.items():
    _packet = getattr(aten, _name)
    lowers(*(getattr(_packet, overload) for overload in ("default", "x_scalar", "n_scalar")))(_fn)


@lowers(aten._efficientzerotensor.default)
def efficientzerotensor(size, *, dtype=None):
    return jnp.zeros(size)  # gets its dtype from the graph


lowers(aten._neg_view.default)(jnp.negative)


@lowers(aten.special_spherical_bessel_j0.default)
def spherical_bessel_j0(x):
    x = _floating(x)
    return jnp.where(jnp.isinf(x), 0, jnp.sinc(x / np.pi)).astype(x.dtype)


@lowers(aten._standard_gamma_grad.default)
def standard_gamma_grad(alpha, sample):
    return jax.lax.random_gamma_grad(alpha, sample)  # pyright: ignore[reportCallIssue]  (its stub is of the kernel)


aten = torch.ops.aten


# Conversions and running totals, in the dtypes in which torch computes them.


def _is_short(dtype):
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize < 4


@lowers(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_):
    if dtype is None:
        return x
    target = jax_dtype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating):
        x = x != 0 if target == jnp.bool_ else jnp.real(x)
    if x.dtype == jnp.bool_ and jnp.issubdtype(target, jnp.inexact):
        return numbers_of(x, target)
    if _is_short(target) and jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.int32)  # torch wraps around, where JAX would stop at the largest value
    return x.astype(target)


def _total_dtype(x, dtype):
    is_whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    return jax_dtype(dtype) if dtype is not None else jax_dtype(torch.int64) if is_whole else x.dtype


def _in_dtype(total):
    """A total of what the elements are in another dtype: of half precision, no sum then overflows."""

    def lowered(x, dim=None, keepdim=False, *, dtype=None):
        axes = tuple(dim) if isinstance(dim, (list, tuple)) else dim
        return total(to_copy(x, dtype=dtype), axis=None if axes == () or not x.ndim else axes, keepdims=keepdim)

    return lowered


lowers(aten.sum.default, aten.sum.dim_IntList)(_in_dtype(jnp.sum))
lowers(aten.nansum.default)(_in_dtype(jnp.nansum))
lowers(aten.mean.default, aten.mean.dim)(_in_dtype(jnp.mean))


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x, dim):
    return in_float32(jax.lax.cumlogsumexp)(x, axis=dim % x.ndim) if x.ndim else x


@lowers(aten.cumsum.default)
def cumsum(x, dim, *, dtype=None):
    x = x.astype(_total_dtype(x, dtype))
    return in_float32(jnp.cumsum)(x, axis=dim) if x.ndim else x


@lowers(aten.cumprod.default)
def cumprod(x, dim, *, dtype=None):
    x = x.astype(_total_dtype(x, dtype))
    return jnp.cumprod(x, axis=dim) if x.ndim else x


@lowers(aten.add.Tensor)
def add(x, y, *, alpha=1):
    if jnp.result_type(x) == jnp.result_type(y) == jnp.bool_:
        return jnp.logical_or(x, jnp.logical_and(y, bool(alpha)))
    return foreign_lowering(aten.add.Tensor)(x, y, alpha=alpha)  # pyright: ignore[reportOptionalCall]


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(x, y, *, rounding_mode=None):
    x, y = jnp.asarray(x), jnp.asarray(y)
    dtype = jnp.result_type(x, y)
    if rounding_mode is None or jnp.issubdtype(dtype, jnp.inexact):
        quotient = jnp.true_divide(x, y)
        return quotient if rounding_mode is None else _round(x, y, quotient, rounding_mode)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    x, y = jnp.broadcast_arrays(x.astype(dtype), y.astype(dtype))
    return jax.lax.div(x, y)


def _round(x, y, quotient, mode):
    """Floor as Python does it: `x - y * floor` is the remainder. A zero divisor gives what it gives unrounded."""
    if mode == "trunc":
        return jnp.trunc(quotient)
    return jnp.where(y == 0, quotient, jnp.floor_divide(x, jnp.where(y == 0, 1, y)))


lowers(aten.fmod.Tensor, aten.fmod.Scalar)(jnp.fmod)  # the remainder that has the sign of the first


def _along(best, place):
    """Returns `(values, indices)`; a NaN wins, and of equals the first."""

    def lowered(x, dim, keepdim=False):
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int32)
        return best(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim)

    return lowered


lowers(aten.max.dim)(_along(jnp.max, jnp.argmax))
lowers(aten.min.dim)(_along(jnp.min, jnp.argmin))


def _running(is_better):
    """Returns `(values, indices)`; the first NaN stays until the next, and of equals the last counts."""

    def pick(before, now):
        takes = (now[0] != now[0]) | is_better(now[0], before[0])
        return tuple(jnp.where(takes, b, a) for a, b in zip(before, now, strict=True))

    def lowered(x, dim):
        if not x.ndim or not x.size:
            return x, jnp.zeros(x.shape, jnp.int32)
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
        return jax.lax.associative_scan(pick, (x, places), axis=dim % x.ndim)

    return lowered


lowers(aten.cummax.default)(_running(jnp.greater_equal))
lowers(aten.cummin.default)(_running(jnp.less_equal))
