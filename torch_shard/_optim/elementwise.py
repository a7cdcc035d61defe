"""Functions that treat each element by itself, so that the shape of their arrays makes no difference to them.

Adam and its kin do; Adafactor, which keeps means over rows and columns, does not. It is read from two traces of the
function, one for either shape of the arrays: they must do the same, by operations that see no shapes. Sums over all
elements are allowed (norms), which then may be taken in another order.
"""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from torch_shard._optim.equation_keys import EqnKey

_BY_ELEMENT = frozenset(
    {"add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "square", "sqrt", "rsqrt", "cbrt", "pow"}
    | {"integer_pow", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sin", "cos", "max", "min"}
    | {"clamp", "select_n", "convert_element_type", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"}
    | {"is_finite", "floor", "ceil", "round", "stop_gradient", "copy", "copy_p", "reduce_precision"}
)
_TO_ONE = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
_CALLS = frozenset({"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "cond"})
_SHAPES = frozenset({"shape", "broadcast_dimensions", "axes", "sharding", "out_sharding"})


def works_by_element(one: ClosedJaxpr, other: ClosedJaxpr, shapes: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Tell whether a function does the same to each element, whichever of two shapes its arrays have.

    Args:
        one: A trace of the function.
        other: A trace of it for arrays of other shapes.
        shapes: Those, by the shapes of the first trace.
    """
    for mine, theirs in zip(one.out_avals, other.out_avals, strict=False):
        if mine.shape != theirs.shape and shapes.get(mine.shape) != theirs.shape:
            return False
    keys = EqnKey(_without_shapes, lambda aval: aval.dtype)
    return all(map(_sees_no_shapes, (one, other))) and len({keys.of_closed(trace) for trace in (one, other)}) == 1


def _without_shapes(eqn: JaxprEqn) -> Mapping[str, object]:
    """Parameters that do not follow from shapes: of a call, the functions that it calls."""
    if eqn.primitive.name in _CALLS:
        return {name: value for name, value in eqn.params.items() if _functions(value)}
    return {name: value for name, value in eqn.params.items() if name not in _SHAPES}


def _functions(value: object) -> list[ClosedJaxpr]:
    """The functions that a parameter holds."""
    values = value if isinstance(value, tuple | list) else (value,)
    return [each for each in values if isinstance(each, ClosedJaxpr)]


def _sees_no_shapes(closed: ClosedJaxpr) -> bool:
    return all(np.ndim(const) == 0 for const in closed.consts) and all(map(_sees_no_shape, closed.jaxpr.eqns))


def _sees_no_shape(eqn: JaxprEqn) -> bool:
    name, ranks, within = eqn.primitive.name, [_rank(v) for v in eqn.invars], list(jaxprs_in_params(eqn.params))
    if name in _CALLS:
        functions = [each for value in eqn.params.values() for each in _functions(value)]
        return len(functions) == len(within) and all(map(_sees_no_shapes, functions))
    if name in _BY_ELEMENT:
        return True
    if name in _TO_ONE:
        return len(eqn.params["axes"]) == ranks[0]
    if name == "broadcast_in_dim":
        return ranks[0] == 0
    return not any(ranks) and not any(map(_rank, eqn.outvars)) and not within


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))
