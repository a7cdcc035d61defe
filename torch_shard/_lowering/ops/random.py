"""Random operators: each takes an explicit key, and draws from the distribution that PyTorch documents.

The streams are JAX's, so the numbers are not those of torch's own generators; the same key gives the same numbers on
every mesh. JAX draws narrow floats from as few random bits as they have digits, 128 numbers in bfloat16: here they are
drawn in float32 and rounded, as PyTorch does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.dtypes import dtype_of_sums, jax_dtype, numbers_of, torch_dtype, widened
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten


def _float_dtype(dtype: torch.dtype | None) -> np.dtype:
    return jax_dtype(dtype or torch.get_default_dtype())


def check_drawn_from(is_distribution, what, *found):
    """Refuse numbers that torch refuses."""
    if not is_distribution:
        raise ValueError(f"Random numbers are drawn with {what}, got {', '.join(map(str, found))}.")


def _uniform(key, shape, dtype, low=0.0, high=1.0):
    check_drawn_from(low <= high, "from <= to", low, high)
    drawn = jax.random.uniform(key, tuple(shape), dtype_of_sums(dtype), low, high).astype(dtype)
    below = np.nextafter(np.asarray(high, dtype), np.asarray(low, dtype))  # rounding may reach the upper bound
    return jnp.minimum(drawn, below)


def _normal(key, shape, dtype, mean=0.0, std=1.0):
    check_drawn_from(isinstance(std, jax.Array) or std >= 0, "std >= 0", std)
    return (mean + std * jax.random.normal(key, tuple(shape), dtype_of_sums(dtype))).astype(dtype)


def _unless(refused, drawn):
    """What was drawn, but where torch raises, which a program cannot do: NaN there, or an index that torch refuses."""
    if drawn.dtype == bool:
        return drawn
    is_float = jnp.issubdtype(drawn.dtype, jnp.floating)
    return jnp.where(refused, jnp.nan if is_float else np.iinfo(drawn.dtype).max, drawn)


@lowers(aten.rand.default, random=True)
def rand(key, size, *, dtype=None):
    return _uniform(key, size, _float_dtype(dtype))


@lowers(aten.randn.default, random=True)
def randn(key, size, *, dtype=None):
    return _normal(key, size, _float_dtype(dtype))


@lowers(aten.randint.low, random=True)
def randint_low(key, low, high, size, *, dtype=None):
    return jax.random.randint(key, tuple(size), low, high).astype(jax_dtype(dtype or torch.int64))


@lowers(aten.randint.default, random=True)
def randint(key, high, size, *, dtype=None):
    return randint_low(key, 0, high, size, dtype=dtype)


@lowers(aten.random.to, random=True)
def random_to(key, x, to):
    return randint_low(key, 0, to, x.shape, dtype=torch_dtype(x.dtype))


@lowers(getattr(aten.random, "from"), random=True)
def random_from(key, x, low, to):
    return randint_low(key, low, to, x.shape, dtype=torch_dtype(x.dtype))


def _like(factory):
    """A factory, given a tensor that has the shape, and the dtype if none is given."""

    def like(key, x, *args, dtype=None):
        return factory(key, *args, x.shape, dtype=dtype or torch_dtype(x.dtype))

    return like


for _like_op, _factory in {
    aten.rand_like.default: rand,
    aten.randn_like.default: randn,
    aten.randint_like.default: randint,
    aten.randint_like.low_dtype: randint_low,
}.items():
    lowers(_like_op, random=True)(_like(_factory))


@lowers(aten.randperm.default, random=True)
def randperm(key, n, *, dtype=None):
    return jax.random.permutation(key, n).astype(jax_dtype(dtype or torch.int64))


@lowers(aten.bernoulli.default, random=True)
def bernoulli(key, probabilities):
    return bernoulli_tensor(key, probabilities, probabilities)


@lowers(aten.bernoulli.Tensor, random=True)
def bernoulli_tensor(key, x, probabilities):
    wide = widened(probabilities)
    drawn = numbers_of(jax.random.bernoulli(key, wide, x.shape), x.dtype)
    return _unless(~((wide >= 0) & (wide <= 1)), drawn)


@lowers(aten.uniform.default, random=True)
def uniform(key, x, low=0.0, high=1.0):
    return _uniform(key, x.shape, x.dtype, low, high)


@lowers(aten.normal_functional.default, random=True)
def normal_functional(key, x, mean=0.0, std=1.0):
    return _normal(key, x.shape, x.dtype, mean, std)


@lowers(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, random=True)
def normal(key, mean=0.0, std=1.0):
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    drawn = _normal(key, shape, jnp.result_type(mean, std), mean, std)
    return _unless(std < 0, drawn) if isinstance(std, jax.Array) else drawn


@lowers(aten.normal.float_float, random=True)
def normal_of_size(key, mean, std, size, *, dtype=None):
    return _normal(key, size, _float_dtype(dtype), mean, std)


@lowers(aten.exponential.default, random=True)
def exponential(key, x, rate=1.0):
    check_drawn_from(rate > 0, "lambda > 0", rate)
    drawn = jax.random.exponential(key, x.shape, dtype_of_sums(x.dtype))
    # PyTorch's is never zero, and its logarithm (Gumbel noise) finite; the smallest of JAX's is 0, the next 2**-23.
    return (jnp.maximum(drawn, 2.0**-24) / rate).astype(x.dtype)


@lowers(aten.geometric.default, random=True)
def geometric(key, x, p):
    check_drawn_from(0 < p < 1, "p between 0 and 1", p)
    return jax.random.geometric(key, p, x.shape).astype(x.dtype)


@lowers(aten.cauchy.default, random=True)
def cauchy(key, x, median=0.0, sigma=1.0):
    check_drawn_from(sigma > 0, "sigma > 0", sigma)
    return (median + sigma * jax.random.cauchy(key, x.shape, dtype_of_sums(x.dtype))).astype(x.dtype)


@lowers(aten.log_normal.default, random=True)
def log_normal(key, x, mean=1.0, std=2.0):
    check_drawn_from(std > 0, "std > 0", std)
    return jnp.exp(_normal(key, x.shape, dtype_of_sums(x.dtype), mean, std)).astype(x.dtype)


@lowers(aten.poisson.default, random=True)
def poisson(key, rate):
    return _unless(~(rate >= 0), jax.random.poisson(key, rate).astype(rate.dtype))


@lowers(aten.multinomial.default, random=True)
def multinomial(key, weights, num_samples, replacement=False):
    weights = widened(weights)
    logits = jnp.log(weights)
    if replacement:
        draws = jax.random.categorical(key, logits, axis=-1, shape=(num_samples, *weights.shape[:-1]))
        draws = jnp.moveaxis(draws, 0, -1)
    else:  # the largest of logits plus Gumbel noise (Vieira 2014, the Gumbel top-k trick)
        draws = jax.lax.top_k(logits + jax.random.gumbel(key, weights.shape, weights.dtype), num_samples)[1]
    allowed = ((weights >= 0) & (weights < jnp.inf)).all(-1, keepdims=True) & (weights > 0).any(-1, keepdims=True)
    return _unless(~allowed, draws.astype(jax_dtype(torch.int64)))


@lowers(aten.rrelu_with_noise_functional.default, random=True)
def rrelu_with_noise_functional(key, x, noise, lower=0.125, upper=1 / 3, training=False):
    """Returns `(out, noise)`: the slope of each element, drawn for the negative ones in training."""
    if not training:
        return jnp.where(x > 0, x, x * np.asarray((lower + upper) / 2, x.dtype)), noise
    slopes = _uniform(key, x.shape, x.dtype, lower, upper)
    slopes = jnp.where(x <= 0, slopes, 1)
    return x * slopes, slopes


@lowers(aten._standard_gamma.default, random=True)
def standard_gamma(key, alpha):
    wide = widened(alpha)
    return jax.random.gamma(key, wide, dtype=wide.dtype).astype(alpha.dtype)


@lowers(aten._sample_dirichlet.default, random=True)
def sample_dirichlet(key, alpha):
    wide = widened(alpha)
    return jax.random.dirichlet(key, wide, dtype=wide.dtype).astype(alpha.dtype)


@lowers(aten.binomial.default, random=True)
def binomial(key, count, probability):
    wide = widened(count)
    return jax.random.binomial(key, wide, widened(probability), dtype=wide.dtype).astype(count.dtype)
