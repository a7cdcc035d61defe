"""The equations of a jaxpr over names, run at once where they do the same to the rows of a stack."""

# JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.sharding import Sharding
from jax.typing import ArrayLike

from torch_shard._optim.equation_keys import Atom, EqnKey, literal_key

# Their batching rules draw other numbers, or draw by a key in ways that depend on its implementation.
RANDOM = frozenset({"random_bits", "random_split", "random_fold_in", "random_seed", "rng_bit_generator", "rng_uniform"})


class RowValue:
    """Result of an operation: one array, or one for each of some rows, stacked.

    Attributes:
        array: The array; None until it is computed.
        rows: Which rows of a stack it has.
        make: Computes it, where that is done when it is asked for.
    """

    def __init__(self, array: Any = None, rows: list[int] | None = None) -> None:
        self.array, self.rows = array, rows
        self.make: Callable[[], None] | None = None
        self._taken: dict[int, jax.Array] = {}

    def _compute(self) -> None:
        if self.array is None and self.make is not None:
            self.make()

    def take(self, row: int | None) -> jax.Array:
        """The array, or that of a row."""
        self._compute()
        if self.rows is None or row is None:
            return self.array
        if row not in self._taken:
            self._taken[row] = jax.lax.index_in_dim(self.array, self.rows.index(row), keepdims=False)
        return self._taken[row]

    def stack(self, rows: list[int]) -> jax.Array:
        """The arrays of some rows, stacked in this order."""
        self._compute()
        if self.rows is None:
            return jnp.broadcast_to(self.array, (len(rows), *jnp.shape(self.array)))
        if rows == self.rows:
            return self.array
        at = [self.rows.index(row) for row in rows]
        if at == list(range(at[0], at[0] + len(at))):
            return jax.lax.slice_in_dim(self.array, at[0], at[-1] + 1)
        return self.array[np.array(at)]


class RowSlot(NamedTuple):
    """The place of a variable of the jaxpr: a value, and which row of it."""

    value: RowValue
    row: int | None

    def take(self) -> jax.Array:
        """The variable's array."""
        return self.value.take(self.row)


def assemble(slots: Iterable[RowSlot]) -> jax.Array:
    """Several variables of one type, stacked."""
    pieces: list[tuple[RowValue, list[Any]]] = []
    for value, row in slots:
        if not pieces or pieces[-1][0] is not value:
            pieces.append((value, []))
        pieces[-1][1].append(row)
    arrays = [value.stack(rows) for value, rows in pieces]
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


@dataclasses.dataclass
class _Operation:
    """An equation; with rows, all those that line up: they take the same row of stacked values, and share others."""

    jaxpr: Jaxpr
    """The source of the equation."""
    eqn: JaxprEqn
    inputs: list[RowSlot]
    outputs: list[RowValue]
    rows: set[int] = dataclasses.field(default_factory=set)

    def run(self) -> None:
        rows = sorted(self.rows)
        if len(rows) > 1:
            arrays = self._evaluate_rows(rows)
        else:
            arrays = self._evaluate(*(s.take() for s in self.inputs))
            if rows:
                arrays = [array[None] for array in arrays]

        for value, array in zip(self.outputs, arrays, strict=True):
            value.array, value.rows = array, rows or None

    def _evaluate_rows(self, rows: list[int]) -> list[jax.Array]:
        operands = [s.take() if s.row is None else s.value.stack(rows) for s in self.inputs]
        axes = [None if s.row is None else 0 for s in self.inputs]
        try:
            return jax.vmap(self._evaluate, in_axes=axes)(*operands)
        except NotImplementedError:  # no batching rule: a callback, a primitive of somebody's own
            pass

        by_row: list[list[jax.Array]] = []
        for row in rows:
            operands = [s.value.take(None if s.row is None else row) for s in self.inputs]
            by_row.append(self._evaluate(*operands))
        return [jnp.stack(arrays) for arrays in zip(*by_row, strict=True)]

    def _evaluate(self, *inputs: jax.Array) -> list[jax.Array]:
        eqn = self.eqn
        jaxpr = self.jaxpr.replace(
            constvars=[], invars=_variables(eqn), outvars=_results(eqn), eqns=[eqn], effects=eqn.effects
        )
        return eval_jaxpr(jaxpr, [], *inputs)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return list(dict.fromkeys(_atoms(eqn.invars)))


def _results(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.outvars if not isinstance(v, DropVar)]


# Sums and maxima over rows: associative and commutative, so that a chain is one reduction for each stack.
_REDUCTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "add": (jax.lax.add, jax.lax.reduce_sum),
    "max": (jax.lax.max, jax.lax.reduce_max),
}


@dataclasses.dataclass
class _Reduction:
    """A chain of additions (or the like) over different rows."""

    name: str
    inputs: list[RowSlot]
    outputs: list[RowValue]
    """The one result."""

    def run(self) -> None:
        combine, reduce = _REDUCTIONS[self.name]
        rows: dict[RowValue, list[int]] = {}
        terms: list[jax.Array] = []
        for value, row in self.inputs:
            if row is None or row in rows.get(value, ()):  # a row that is added twice counts twice
                terms.append(value.take(row))
            else:
                rows.setdefault(value, []).append(row)

        for value, value_rows in rows.items():
            terms.append(reduce(value.stack(sorted(value_rows)), (0,)))
        self.outputs[0].array = functools.reduce(combine, terms)


class RowProgram:
    """Operations in an order in which they can run: each is made after those that make what it takes."""

    def __init__(self) -> None:
        self.operations: list[_Operation | _Reduction] = []
        self._keys = EqnKey()
        self._random: dict[int, bool] = {}
        self._known: dict[Hashable, _Operation] = {}
        self._constants: dict[Hashable, RowValue] = {}

    def run(self) -> None:
        """Compute all values."""
        for operation in self.operations:
            operation.run()

    def run_when_asked(self) -> None:
        """Compute values when they are asked for; effects, now."""
        makers = {value: number for number, operation in enumerate(self.operations) for value in operation.outputs}

        def run(number: int) -> None:
            todo, needed = [number], set[int]()  # no recursion: a chain of operations may be longer than Python's stack
            while todo:
                needed.add(at := todo.pop())
                values = {slot.value for slot in self.operations[at].inputs}
                todo += {makers[v] for v in values if v.array is None and v in makers} - needed
            for at in sorted(needed):
                self.operations[at].run()

        for value, number in makers.items():
            value.make = functools.partial(run, number)
        for number, operation in enumerate(self.operations):
            if isinstance(operation, _Operation) and operation.eqn.effects:
                run(number)

    def add(self, jaxpr: Jaxpr, inputs: Iterable[RowSlot]) -> list[RowSlot]:
        """Take in a jaxpr."""
        slots = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        chains = _find_chains(jaxpr)
        for eqn in jaxpr.eqns:
            chain = chains.get(eqn.outvars[0]) if eqn.outvars else None
            if chain is None:
                self._add(jaxpr, eqn, slots)
            elif eqn is chain.eqns[-1]:  # now that all its terms are known
                self._add_chain(jaxpr, chain, slots)
        return [self._slot(v, slots) for v in jaxpr.outvars]

    def _slot(self, atom: Atom, slots: dict[Var, RowSlot]) -> RowSlot:
        if not isinstance(atom, Literal):
            return slots[atom]
        dtype = atom.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
        return self._constant(literal_key(atom), atom.val, dtype)

    def _constant(self, key: Hashable, value: ArrayLike, dtype: np.dtype | None = None) -> RowSlot:
        if key not in self._constants:
            self._constants[key] = RowValue(value if dtype is None else jnp.asarray(value, dtype))
        return RowSlot(self._constants[key], None)

    def _add_chain(self, jaxpr: Jaxpr, chain: "_Chain", slots: dict[Var, RowSlot]) -> None:
        terms, end = [self._slot(term, slots) for term in chain.terms], chain.eqns[-1]
        if len({slot.row for slot in terms} - {None}) > 1:
            reduction = _Reduction(end.primitive.name, terms, [RowValue()])
            self.operations.append(reduction)
            slots[end.outvars[0]] = RowSlot(reduction.outputs[0], None)
        else:
            for eqn in chain.eqns:
                self._add(jaxpr, eqn, slots)

    def _add(self, jaxpr: Jaxpr, eqn: JaxprEqn, slots: dict[Var, RowSlot]) -> None:
        rows = {slots[v].row for v in _variables(eqn)} - {None}
        lines_up = len(rows) == 1 and not eqn.effects and not self._is_random(eqn)
        body = _body(eqn)
        if body is not None and rows and not (lines_up and eqn.primitive.name == "jit"):
            inputs = [self._constant(id(const), const) for const in body.consts]
            inputs += [self._slot(v, slots) for v in eqn.invars]
            slots.update(zip(eqn.outvars, self.add(body.jaxpr, inputs), strict=True))
            return

        operation = self._operation(jaxpr, eqn, slots, lines_up)
        row = rows.pop() if lines_up else None
        if row is not None:
            operation.rows.add(row)
        slots.update((v, RowSlot(value, row)) for v, value in zip(_results(eqn), operation.outputs, strict=True))

    def _is_random(self, eqn: JaxprEqn) -> bool:
        """Tell whether an equation draws random numbers, itself or within."""
        return eqn.primitive.name in RANDOM or any(map(self._draws, jaxprs_in_params(eqn.params)))

    def _draws(self, jaxpr: Jaxpr) -> bool:
        if id(jaxpr) not in self._random:
            self._random[id(jaxpr)] = any(map(self._is_random, jaxpr.eqns))
        return self._random[id(jaxpr)]

    def _operation(self, jaxpr: Jaxpr, eqn: JaxprEqn, slots: dict[Var, RowSlot], lines_up: bool) -> _Operation:
        """The one that does this, made unless it is known."""

        def describe(atom: Atom) -> Hashable:
            if isinstance(atom, Literal):
                return literal_key(atom)
            value, row = slots[atom]
            return value, (row is not None) if lines_up else row

        drops = tuple(isinstance(v, DropVar) for v in eqn.outvars)
        key = lines_up, self._keys.key(eqn), tuple(map(describe, eqn.invars)), drops
        if eqn.effects or key not in self._known:
            inputs = [slots[v] for v in _variables(eqn)]
            self._known[key] = _Operation(jaxpr, eqn, inputs, [RowValue() for _ in _results(eqn)])
            self.operations.append(self._known[key])
        return self._known[key]


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation only wraps: a function under jit, or one with a derivative of its own."""
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.params["call_jaxpr"]
    if eqn.primitive.name != "jit":
        return None
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return None if any(isinstance(s, Sharding) for s in shardings) else eqn.params["jaxpr"]


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Equations of one associative and commutative primitive whose results only the next of them uses."""

    eqns: list[JaxprEqn]
    terms: list[Atom]


def _find_chains(jaxpr: Jaxpr) -> dict[Var, _Chain]:
    """The chains of at least two equations, by the results of each of these."""
    uses = collections.Counter(v for eqn in jaxpr.eqns for v in _atoms(eqn.invars))
    uses.update(_atoms(jaxpr.outvars))
    links = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if _is_link(eqn)}

    def continues(v: Var, eqn: JaxprEqn) -> bool:
        return v in links and uses[v] == 1 and links[v].primitive is eqn.primitive

    order = {v: number for number, v in enumerate(links)}
    inner = {v for eqn in links.values() for v in _atoms(eqn.invars) if continues(v, eqn)}
    chains: dict[Var, _Chain] = {}
    for result, end in links.items():
        if result in inner:
            continue

        eqns = [end]
        terms: list[Atom] = []
        todo = end.invars[::-1]
        while todo:
            atom = todo.pop()
            if not isinstance(atom, Literal) and atom in inner:
                eqns.append(links[atom])
                todo += links[atom].invars[::-1]
            else:
                terms.append(atom)
        if len(eqns) > 1:
            chain = _Chain(sorted(eqns, key=lambda eqn: order[eqn.outvars[0]]), terms)
            chains |= {eqn.outvars[0]: chain for eqn in eqns}
    return chains


def _atoms(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _is_link(eqn: JaxprEqn) -> bool:
    """Tell whether an equation combines two values of one type into one of that type."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return len({(aval.shape, aval.dtype) for aval in avals}) == 1
