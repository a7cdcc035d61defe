"""When two equations of a jaxpr do the same: keys that are equal only for equal primitives and parameters."""

from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

# Their batching rules draw other numbers, or draw by a key in ways that depend on its implementation.
RANDOM = frozenset({"random_bits", "random_split", "random_fold_in", "random_seed", "rng_bit_generator", "rng_uniform"})


class Alike:
    """Keys of equations, each part compared by structure; what has none is compared by identity.

    The jaxprs that it is asked about must outlive it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, Hashable] = {}
        self._random: dict[int, bool] = {}

    def key(self, eqn: JaxprEqn) -> Hashable:
        """Equal for equations that do the same to equal inputs."""
        return eqn.primitive, self._freeze(eqn.params), _context(eqn)

    def is_random(self, eqn: JaxprEqn) -> bool:
        """Whether it draws random numbers, itself or within."""
        return eqn.primitive.name in RANDOM or any(map(self._draws, jaxprs_in_params(eqn.params)))

    def _draws(self, jaxpr: Jaxpr) -> bool:
        if id(jaxpr) not in self._random:
            self._random[id(jaxpr)] = any(map(self.is_random, jaxpr.eqns))
        return self._random[id(jaxpr)]

    def _freeze(self, value: Any) -> Hashable:
        if isinstance(value, dict):
            return tuple((name, self._freeze(v)) for name, v in sorted(value.items()))
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self._freeze, value))
        if isinstance(value, ClosedJaxpr):
            return self._of_jaxpr(value.jaxpr), tuple(map(self._freeze, value.consts))
        if isinstance(value, Jaxpr):
            return self._of_jaxpr(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return _bits(value)
        if isinstance(value, (float, complex)):
            return type(value), repr(value)  # 0.0 == -0.0
        if callable(value) or not _is_hashable(value):
            return "identity", id(value)
        return type(value), value  # True == 1

    def _of_jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        if id(jaxpr) not in self._known:
            whole = tuple(self._parts(jaxpr))
            self._known[id(jaxpr)] = "jaxpr", self._numbers.setdefault(whole, len(self._numbers))
        return self._known[id(jaxpr)]

    def _parts(self, jaxpr: Jaxpr) -> Iterator[Hashable]:
        """The jaxpr with its variables numbered in the order in which they appear."""
        numbers = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
        yield tuple(type_key(v.aval) for v in numbers)

        def atom(v: Any) -> Hashable:
            return literal_key(v) if isinstance(v, Literal) else numbers[v]

        for eqn in jaxpr.eqns:
            yield self.key(eqn), tuple(map(atom, eqn.invars)), tuple(type_key(v.aval) for v in eqn.outvars)
            numbers |= {v: len(numbers) + i for i, v in enumerate(eqn.outvars)}
        yield tuple(map(atom, jaxpr.outvars))


def literal_key(literal: Literal) -> Hashable:
    """Equal for literals of the same value, to the bit, and type."""
    return "literal", _bits(literal.val), type_key(literal.aval)


def type_key(aval: Any) -> Hashable:
    """Shape, dtype and whatever else tells types apart."""
    return aval, getattr(aval, "weak_type", None)


def _context(eqn: JaxprEqn) -> Hashable:
    """Settings under which the equation was traced (matmul precision is a parameter, these are not)."""
    ctx = getattr(eqn, "ctx", None)
    return tuple(getattr(ctx, name, None) for name in ("compute_type", "threefry_partitionable", "xla_metadata"))


def _bits(value: Any) -> Hashable:
    if isinstance(value, jax.Array):
        return "identity", id(value)
    array = np.asarray(value)
    return type(value), array.dtype, array.shape, array.tobytes()


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
