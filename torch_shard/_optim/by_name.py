"""A function of arrays by name, run on stacked arrays: what it does alike to the rows of a stack it does at once.

The function is traced on the rows, so it sees each name with its own shape. In the jaxpr, equations that do the same
to the rows of the same stacks, row by row, are run as one under `jax.vmap`. What does not line up is run as it stands.
So the result is that of the function by its structure, whatever the function is.
"""

# JAX annotates some of its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from torch_shard._common.host_memory import is_on_host
from torch_shard._common.types import PyTree
from torch_shard._optim.equation_keys import EqnKey
from torch_shard._optim.transfers import HostTransfers
from torch_shard._optim.vectorize import RowProgram, RowSlot, RowValue, assemble
from torch_shard._sharding import Layout, Stacks, as_dicts, keep_stacks, stack_dicts, whole_stacks


def run_by_name(
    fn: Callable[..., PyTree], *args: PyTree, layout: Layout, transfers: HostTransfers | None = None
) -> PyTree:
    """Call `fn` as if every `Stacks` were a plain dict, at the price of the stored arrays.

    It sees entries in torch's shape; but where that makes no difference to it, as each element goes by itself, those
    that are kept in pieces as these, so that nothing moves between devices.

    Args:
        fn: A function of pytrees that JAX can trace; it is traced with dicts by name, and once more where forms differ.
        *args: Pytrees of arrays, some of them in `Stacks`.
        layout: How dicts by these names (or some of them) are stored in the result.
        transfers: Of arguments that lie in the host's memory, if some do; the results replace what it says.

    Returns:
        What `fn` returns, with `Stacks` for dicts by name. The values are those of the plain call, up to the order in
        which a sum over all names is taken and to what XLA makes of a stack.

    Example:
        >>> import jax.numpy as jnp
        >>> stacks = Stacks.from_dict({"0.w": jnp.ones(3), "1.w": jnp.ones(3)}, (("0.w", "1.w"),))
        >>> twice = run_by_name(lambda by: {n: 2 * v for n, v in by.items()}, stacks, layout=stacks.layout)
        >>> twice.arrays[0].shape, float(twice["1.w"].sum())
        ((2, 3), 6.0)
    """
    if not layout.kept:
        if transfers is None and all(len(group) == 1 for group in layout.groups):
            return stack_dicts(fn(*as_dicts(args)), layout)
        return _Traced(fn, args, transfers).run(layout)
    whole = _Traced(fn, whole_stacks(args), transfers)

    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for form in layout.forms.values():
        if form.is_rearranged:
            shapes[form.shape] = form.stored_shape

    # Torch's shape of a fused projection cuts across its pieces: to restore it moves it between devices. Adam and its
    # kin need not see it.
    rearranged = _trace_rearranged(fn, args, transfers) if shapes else None
    if rearranged is not None and works_by_element(whole.closed, rearranged.closed, shapes):
        return keep_stacks(rearranged.run(layout.plain), layout, but_rearranged=True)
    return keep_stacks(whole.run(layout.plain), layout)


def _trace_rearranged(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], transfers: HostTransfers | None
) -> "_Traced | None":
    """A trace on arrays as they are kept; None for a function that asks for the shapes and refuses these."""
    try:
        return _Traced(fn, whole_stacks(args, but_rearranged=True), transfers)
    except Exception:  # what else may be wrong, the trace on torch's shapes has raised
        return None


class _Traced:
    """A function that was traced on arrays by name, to be run on the stacks that these are rows of."""

    def __init__(self, fn: Callable[..., PyTree], args: tuple[PyTree, ...], transfers: HostTransfers | None) -> None:
        self._transfers, self._brought = transfers, dict[int, RowValue]()
        self._leaves = jax.tree.map(self._by_name, args, is_leaf=lambda node: isinstance(node, Stacks))
        structs = jax.tree.map(lambda leaf: leaf.struct, self._leaves)
        self.closed, self._out = jax.make_jaxpr(fn, return_shape=True)(*structs)

    def run(self, layout: Layout) -> PyTree:
        """What the function returns, with `Stacks` for dicts by name."""
        program = RowProgram()
        inputs = [RowSlot(RowValue(const), None) for const in self.closed.consts]
        inputs += [leaf.slot for leaf in jax.tree.leaves(self._leaves)]
        slots = program.add(self.closed.jaxpr, inputs)

        shapes, tree = cast(tuple[list[jax.ShapeDtypeStruct], object], jax.tree.flatten(self._out))
        results = [_Result(s.shape, s.dtype, [slot]) for s, slot in zip(shapes, slots, strict=True)]
        stacked = stack_dicts(jax.tree.unflatten(tree, results), layout, _Result.stack)
        if self._transfers is None:
            program.run()
            return jax.tree.map(lambda result: result.array, stacked)

        program.run_when_asked()
        return self._one_by_one(stacked, self._transfers)

    def _one_by_one(self, stacked: PyTree, transfers: HostTransfers) -> PyTree:
        """Results, a stored array of parameters and what is kept for it after the other; back in the host's memory."""
        paths, tree = jax.tree_util.tree_flatten_with_path(stacked)

        # The last key of a path is the name of a stored array: its parameter and its moments are computed together, so
        # that the moments of one alone are in the device's memory at a time.
        numbers = collections.defaultdict[str, list[int]](list)
        for number, (path, _) in enumerate(paths):
            numbers[str(path[-1:])].append(number)

        arrays: dict[int, PyTree] = {}
        for together in numbers.values():
            old_arrays: dict[int, jax.Array] = {}
            for number in together:
                arrays[number] = paths[number][1].array
                if number in transfers.replaced:
                    on_host = transfers.replaced[number]
                    old_arrays[number] = self._brought[id(on_host)].take(None)
            if old_arrays:
                arrays |= transfers.send({number: arrays[number] for number in old_arrays}, old_arrays)
        return jax.tree.unflatten(tree, [arrays[number] for number in range(len(paths))])

    def _by_name(self, node: PyTree) -> PyTree:
        """A `Stacks` as a dict of leaves by name, an array as a leaf."""
        if not isinstance(node, Stacks):
            return _leaf(self._value(node), node, None)

        leaves: dict[str, PyTree] = {}
        for group, stored in zip(node.layout.groups, node.arrays, strict=True):
            if len(group) == 1:
                leaves[group[0]] = jax.tree.map(self._by_name, stored)
                continue
            value = self._value(stored, list(range(len(group))))
            for row, name in enumerate(group):
                leaves[name] = _leaf(value, stored, row)
        return leaves

    def _value(self, array: jax.Array, rows: list[int] | None = None) -> RowValue:
        """An array; what lies in the host's memory is brought in late."""
        transfers = self._transfers
        if transfers is None or not is_on_host(array):
            return RowValue(array, rows)
        value = self._brought[id(array)] = RowValue(None, rows)
        value.make = lambda: setattr(value, "array", transfers.bring(array))
        return value


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf of the arguments by name: where it is found, and its type."""

    slot: RowSlot
    struct: jax.ShapeDtypeStruct


def _leaf(value: RowValue, array: jax.Array, row: int | None) -> _Leaf:
    aval = jax.typeof(array)
    shape = aval.shape if row is None else aval.shape[1:]
    return _Leaf(RowSlot(value, row), jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))


@dataclasses.dataclass(frozen=True)
class _Result:
    """A leaf of the result, or several stacked: its type, and where it is found."""

    shape: tuple[int, ...]
    dtype: np.dtype
    slots: list[RowSlot]

    @classmethod
    def stack(cls, rows: list["_Result"]) -> "_Result":
        return cls((len(rows), *rows[0].shape), rows[0].dtype, [slot for row in rows for slot in row.slots])

    @property
    def array(self) -> jax.Array:
        one = len(self.slots) == 1  # a group has two names or more
        return self.slots[0].take() if one else assemble(self.slots)


# Functions that treat each element by itself, so that the shape of their arrays makes no difference to them.
#
# Adam and its kin do; Adafactor, which keeps means over rows and columns, does not. It is read from two traces of the
# function, one for either shape of the arrays: they must do the same, by operations that see no shapes. Sums over all
# elements are allowed (norms), which then may be taken in another order.


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
    name = eqn.primitive.name
    ranks = [_rank(atom) for atom in eqn.invars]
    inner_jaxprs = list(jaxprs_in_params(eqn.params))

    if name in _CALLS:
        functions: list[ClosedJaxpr] = []
        for value in eqn.params.values():
            functions += _functions(value)
        return len(functions) == len(inner_jaxprs) and all(map(_sees_no_shapes, functions))
    if name in _BY_ELEMENT:
        return True
    if name in _TO_ONE:
        return len(eqn.params["axes"]) == ranks[0]  # a sum over rows alone would be over other rows in other dims
    if name == "broadcast_in_dim":
        return ranks[0] == 0

    # Of what is unknown, only arithmetic on scalars is safe.
    is_scalar = not any(ranks) and not any(map(_rank, eqn.outvars))
    return is_scalar and not inner_jaxprs


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))
