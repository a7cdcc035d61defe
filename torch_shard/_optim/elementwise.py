"""Functions that treat each element by itself, so that the shape of their arrays makes no difference to them.

Adam and its kin do; Adafactor, which keeps means over rows and columns, does not. It is read from two traces of the
function, one for either shape of the arrays: they must do the same, by operations that see no shapes. Sums over all
elements are allowed (norms), which then may be taken in another order.
"""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from torch_shard._common.types import PyTree

_BY_ELEMENT = frozenset(
    {"add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "square", "sqrt", "rsqrt", "cbrt", "pow"}
    | {"integer_pow", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sin", "cos", "max", "min"}
    | {"clamp", "select_n", "convert_element_type", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"}
    | {"is_finite", "floor", "ceil", "round", "stop_gradient", "copy", "copy_p", "reduce_precision"}
)
_TO_ONE = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
_CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "cond"})
_SHAPES = frozenset({"shape", "broadcast_dimensions", "axes", "sharding", "out_sharding"})


def works_by_element(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    others: tuple[PyTree, ...],
    shapes: Mapping[tuple[int, ...], tuple[int, ...]],
) -> bool:
    """Tell whether a function does the same to each element, whichever of two shapes its arrays have.

    Args:
        fn: A function of pytrees that JAX can trace.
        args: Its arguments.
        others: The same, of which some arrays have other shapes.
        shapes: For each shape that differs, the other one; results that differ must do so alike.
    """
    try:
        traces = [jax.make_jaxpr(fn)(*jax.tree.map(_struct, given)) for given in (args, others)]
    except Exception:  # it asks for the shapes; what else is wrong, the call itself says
        return False
    for one, other in zip(*(trace.out_avals for trace in traces), strict=False):
        if one.shape != other.shape and shapes.get(one.shape) != other.shape:
            return False
    has_scalars_alone = all(np.ndim(const) == 0 for trace in traces for const in trace.consts)
    same_consts = has_scalars_alone and all(itertools.starmap(_same, zip(*(t.consts for t in traces), strict=False)))
    return same_consts and _alike(*(trace.jaxpr for trace in traces))


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    aval: Any = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tracer) and bool(np.array_equal(one, other, equal_nan=True)))


def _alike(one: Jaxpr, other: Jaxpr) -> bool:
    """Tell whether two jaxprs do the same to each element."""
    if len(one.eqns) != len(other.eqns) or len(one.invars) != len(other.invars):
        return False
    numbers: list[dict[Any, int]] = [{}, {}]

    def wiring(number: int, atoms: list[Any]) -> list[object]:
        known = numbers[number]
        return [_literal(v) if isinstance(v, Literal) else known.setdefault(v, len(known)) for v in atoms]

    def wired(first: list[Any], second: list[Any]) -> bool:
        return wiring(0, first) == wiring(1, second)

    if not wired([*one.constvars, *one.invars], [*other.constvars, *other.invars]):
        return False
    for eqn, twin in zip(one.eqns, other.eqns, strict=True):
        if not _does_the_same(eqn, twin) or not wired([*eqn.invars, *eqn.outvars], [*twin.invars, *twin.outvars]):
            return False
    return wired(list(one.outvars), list(other.outvars))


def _literal(literal: Literal) -> object:
    return str(literal.aval.dtype), np.asarray(literal.val).tobytes()  # pyright: ignore[reportAttributeAccessIssue]


def _does_the_same(eqn: JaxprEqn, twin: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if eqn.primitive is not twin.primitive or not all(map(_sees_no_shape, (eqn, twin))):
        return False
    if name in _CALLS:
        inner = [list(jaxprs_in_params(e.params)) for e in (eqn, twin)]
        return len(inner[0]) == len(inner[1]) and all(itertools.starmap(_alike, zip(*inner, strict=True)))
    kept = [{k: repr(v) for k, v in e.params.items() if k not in _SHAPES} for e in (eqn, twin)]
    return kept[0] == kept[1]


def _sees_no_shape(eqn: JaxprEqn) -> bool:
    name, ranks = eqn.primitive.name, [_rank(v) for v in eqn.invars]
    if name in _BY_ELEMENT or name in _CALLS:
        return True
    if name in _TO_ONE:
        return len(eqn.params["axes"]) == ranks[0]
    if name == "broadcast_in_dim":
        return ranks[0] == 0
    return not any(ranks) and not any(map(_rank, eqn.outvars)) and not list(jaxprs_in_params(eqn.params))


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))
