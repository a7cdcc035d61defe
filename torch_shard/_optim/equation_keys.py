"""Equations of a jaxpr that do the same: keys that are equal only for equal primitives and parameters."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

Atom = Var | Literal


def type_key(aval: object) -> Hashable:
    """Shape, dtype and whatever else tells types apart."""
    return aval, getattr(aval, "weak_type", None)


class EqnKey:
    """Keys of equations, each part compared by structure; what has none is compared by identity.

    The jaxprs that it is asked about must outlive it.
    """

    def __init__(
        self,
        params: Callable[[JaxprEqn], Mapping[str, object]] = lambda eqn: eqn.params,
        types: Callable[[Any], Hashable] = type_key,
    ) -> None:
        self._params, self._type = params, types
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, Hashable] = {}

    def key(self, eqn: JaxprEqn) -> Hashable:
        """Equal for equations that do the same to equal inputs."""
        return eqn.primitive, self._freeze(dict(self._params(eqn))), _context(eqn)

    def _freeze(self, value: object) -> Hashable:
        kind = type(value)
        if isinstance(value, dict):
            return tuple((name, self._freeze(v)) for name, v in sorted(cast(dict[str, object], value).items()))
        if isinstance(value, (tuple, list)):
            return (kind, *map(self._freeze, cast(Iterable[object], value)))
        if isinstance(value, ClosedJaxpr):
            return self.of_closed(value)
        if isinstance(value, Jaxpr):
            return self.of_jaxpr(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return _bits(value)
        if isinstance(value, (float, complex)):
            return type(value), repr(value)  # 0.0 == -0.0
        if callable(value) or not _is_hashable(value):
            return "identity", id(value)
        return type(value), value  # True == 1

    def of_jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        """Equal for jaxprs that do the same."""
        if id(jaxpr) not in self._known:
            whole = tuple(self._parts(jaxpr))
            self._known[id(jaxpr)] = "jaxpr", self._numbers.setdefault(whole, len(self._numbers))
        return self._known[id(jaxpr)]

    def of_closed(self, closed: ClosedJaxpr) -> Hashable:
        """Equal for jaxprs that do the same with the same constants."""
        return self.of_jaxpr(closed.jaxpr), tuple(map(self._freeze, closed.consts))

    def _parts(self, jaxpr: Jaxpr) -> Iterator[Hashable]:
        """The jaxpr with its variables numbered in the order in which they appear."""
        numbers = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
        yield tuple(self._type(v.aval) for v in numbers)

        def atom(v: Atom) -> Hashable:
            return literal_key(v) if isinstance(v, Literal) else numbers[v]

        for eqn in jaxpr.eqns:
            yield self.key(eqn), tuple(map(atom, eqn.invars)), tuple(self._type(v.aval) for v in eqn.outvars)
            numbers |= {v: len(numbers) + i for i, v in enumerate(eqn.outvars)}
        yield tuple(map(atom, jaxpr.outvars))


def literal_key(literal: Literal) -> Hashable:
    """Equal for literals of the same value, to the bit, and type."""
    return "literal", _bits(literal.val), type_key(literal.aval)


def _context(eqn: JaxprEqn) -> Hashable:
    """Settings under which the equation was traced (matmul precision is a parameter, these are not)."""
    ctx = getattr(eqn, "ctx", None)
    return tuple(getattr(ctx, name, None) for name in ("compute_type", "threefry_partitionable", "xla_metadata"))


def _bits(value: ArrayLike | np.generic) -> Hashable:
    if isinstance(value, jax.Array) and not _is_known_scalar(value):
        return "identity", id(value)
    array = np.asarray(value)
    return type(value), array.dtype, array.shape, array.tobytes()


def _is_known_scalar(array: jax.Array) -> bool:
    is_number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool  # a random key is none
    return not isinstance(array, Tracer) and is_number and array.ndim == 0 and array.is_fully_addressable


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
