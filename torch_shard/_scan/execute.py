"""Instructions and loops as a function of JAX arrays: a loop is one `lax.scan` over stacked values."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from torch_shard._common.random import Key
from torch_shard._lowering import RowSplit, matmul_precision
from torch_shard._scan.instructions import BundleValues, Instruction, Operand, Output, wide
from torch_shard._scan.reroll import Loop
from torch_shard._sharding import Kept


class Inputs(Protocol):
    """The inputs of a program by number, and in a bundle by the number of the member; some are rows of stacks."""

    def __getitem__(self, at: tuple[int, ...]) -> jax.Array: ...

    def row(self, at: tuple[int, ...]) -> "StackRow | None":
        """The stack of which it is a row, if it is one."""
        ...


@dataclasses.dataclass(frozen=True)
class StackRow:
    """One row of stacked results."""

    stack: jax.Array
    index: int


Result = Any
"""An array, a `StackRow`, for a bundle a list of them with None for zero, or what is not a tensor."""


def array_of(value: Result) -> Any:
    """A result as an array of its own."""
    return value.stack[value.index] if isinstance(value, StackRow) else value


def stack_of(values: Sequence[Result]) -> Result:
    """Results stacked: without a copy where they are the rows of one stack, in order."""
    pieces: list[Result] = []
    for _, neighbours in itertools.groupby(enumerate(values), lambda pair: _run_of(*pair)):
        rows = [value for _, value in neighbours]
        first, last = rows[0], rows[-1]
        if isinstance(first, StackRow):
            pieces.append(first.stack[first.index : last.index + 1])
        else:
            pieces.append(jnp.stack(rows))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _run_of(position: int, value: Result) -> Hashable:
    """The same for neighbours that can be taken at once."""
    return (id(value.stack), position - value.index) if isinstance(value, StackRow) else None


class StackRows(Mapping[str, jax.Array]):
    """Results by name, of which some are rows of stacks, and some in the form in which an entry is kept.

    Args:
        values: By name.
        forms: Of those in another form than torch's, which `[name]` gives.
    """

    def __init__(
        self, values: Mapping[str, Result] | Iterable[tuple[str, Result]], forms: Mapping[str, Kept] | None = None
    ) -> None:
        self._values, self.forms = dict(values), forms or {}

    def __getitem__(self, name: str) -> jax.Array:
        form = self.forms.get(name)
        return self.kept(name) if form is None else form.restore(self.kept(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stacked(self, names: Sequence[str]) -> jax.Array:
        """`(n, *shape)`."""
        form = self.forms.get(names[0])
        return self.kept_rows(names) if form is None else form.restore(self.kept_rows(names), is_stack=True)

    def kept(self, name: str) -> jax.Array:
        """A value in the form in which it is kept."""
        return array_of(self._values[name])

    def kept_rows(self, names: Sequence[str]) -> jax.Array:
        """Several, stacked."""
        return stack_of([self._values[name] for name in names])


def execute(
    items: Sequence[Instruction | Loop],
    outputs: Sequence[Output],
    key: Key,
    inputs: Inputs,
    *,
    split: RowSplit | None,
    known: Mapping[Operand, Result] | None = None,
) -> list[Result]:
    """Run instructions and loops.

    Args:
        items: In order.
        outputs: `Operand`s, `BundleValues`, or what is not a tensor.
        key: A random key, or None.
        inputs: What `Operand`s with a number are.
        split: How the rows of the batch lie on the mesh of a step.
        known: What others have made that ran before.

    Returns:
        For each output an array or a `StackRow`, for a bundle a list of them, with None for zero.
    """
    run = _Run(items, outputs, inputs, split=split, known=known or {})
    with matmul_precision():
        for item in items:
            if isinstance(item, Loop):
                run.loop(item, key)
            else:
                with item.scope():
                    values = [array_of(run.read(v)) for v in item.sources]
                    run.done[item] = item.operate(key, item.place, values, split)
        return [run.output(value) for value in outputs]


class _Run:
    def __init__(
        self,
        items: Sequence[Instruction | Loop],
        outputs: Sequence[Output],
        inputs: Inputs,
        *,
        split: RowSplit | None,
        known: Mapping[Operand, Result],
    ) -> None:
        self._inputs, self._split, self._known = inputs, split, dict(known)
        """What others have made, and loops, whose results are rows."""
        self.done: dict[Instruction, Result] = {}
        self._wanted: dict[int | Instruction, set[tuple[int, ...]]] = {}
        self._outputs = operands_of(outputs)
        for value in (*itertools.chain(*map(reads_of, items)), *self._outputs):
            self._wanted.setdefault(value.source, set()).add(value.path)

    def output(self, value: Output) -> Result:
        """Value of an output."""
        if isinstance(value, BundleValues):
            return [None if v is None else self.read(v) for v in value.values]
        return self.read(value) if isinstance(value, Operand) else value

    def read(self, value: Operand) -> Result:
        """The array or row that a value is."""
        if value in self._known:
            return self._known[value]
        if isinstance(value.source, int):
            return self._inputs[(value.source, *value.path)]
        return wide(_at(self.done[value.source], value.path))

    def _stack_and_rows(self, values: Sequence[Operand]) -> tuple[Result, Result]:
        """Values that iterations are given: `(None, stack)`, or `(stack, rows)` where they are some rows of a stack."""
        results = [row_or_value(value, self._inputs, self.read) for value in values]
        first = results[0]
        if isinstance(first, StackRow) and all(isinstance(r, StackRow) and r.stack is first.stack for r in results):
            rows = [result.index for result in results]

            # All rows in order are the stack itself; of others a scan takes each by its number, without a copy.
            if rows != list(range(len(first.stack))):
                return first.stack, jnp.asarray(rows, jnp.int32)
        return None, stack_of(results)

    def loop(self, loop: Loop, key: Key) -> None:
        """Run a loop; its results are kept as rows."""
        num_iterations = len(loop.iterations)
        backwards = _runs_backwards(loop)
        step = -1 if backwards else 1
        fixed = [array_of(self.read(v)) for v in loop.fixed]
        stacks_and_rows = [self._stack_and_rows(values[::step]) for values in loop.each]
        stacks = [stack for stack, _ in stacks_and_rows]
        places = {i: jnp.asarray(of[::step], jnp.int32) for i, of in places_of(loop).items()}
        results = self._results(loop)

        def body(carry: list[jax.Array], xs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            rows, places = xs
            each = [row if stack is None else stack[row] for stack, row in zip(stacks, rows, strict=True)]
            known = {"carry": carry, "each": each, "fixed": fixed}
            return iterate(loop, results, key, known, places, self._split)

        first = [array_of(self.read(value)) for value, _, _ in loop.carries]
        if loop.is_backward:
            first = self._after_outputs(first)
        rows = [rows for _, rows in stacks_and_rows]
        with jax.named_scope("backward") if loop.is_backward else contextlib.nullcontext():
            last, outputs = jax.lax.scan(body, first, (rows, places), length=num_iterations, reverse=backwards)

        for (number, path), output in zip(results, outputs, strict=True):
            stack = wide(output)
            for iteration, span in enumerate(loop.iterations):
                row = num_iterations - 1 - iteration if backwards else iteration
                self._known[Operand(span[number], path)] = StackRow(stack, row)
        for (_, number, path), value in zip(loop.carries, last, strict=True):
            if (number, path) not in results:
                self._known[Operand(loop.iterations[-1][number], path)] = value

    def _after_outputs(self, values: list[jax.Array]) -> list[jax.Array]:
        """The same values, for which a program must wait until the outputs made so far are there.

        Else XLA may make the gradient of the last layer's weight after the loop, and keep for it what that is made of,
        such as logits.
        """
        sources = dict.fromkeys(v.source for v in self._outputs if isinstance(v.source, Instruction))
        made = {source: self.done[source] for source in sources if isinstance(self.done.get(source), jax.Array)}
        values, arrays = jax.lax.optimization_barrier((values, list(made.values())))
        self.done |= dict(zip(made, arrays, strict=True))
        return values

    def _results(self, loop: Loop) -> list[tuple[int, tuple[int, ...]]]:
        """`(number of the instruction, path)` of what is read outside, and is not only handed on."""
        handed = {(number, path) for _, number, path in loop.carries}
        last_span = loop.iterations[-1]
        results: dict[tuple[int, tuple[int, ...]], None] = {}
        for span in loop.iterations:
            for number, instruction in enumerate(span):
                for path in sorted(self._wanted.get(instruction, ())):
                    # What the last iteration hands on is what the scan gives besides the stacks.
                    if span is not last_span or (number, path) not in handed:
                        results[number, path] = None
        return list(results)


def iterate(
    loop: Loop,
    results: Sequence[tuple[int, tuple[int, ...]]],
    key: Key,
    known: Mapping[str, Sequence[Result]],
    places: Mapping[int, jax.Array],
    split: RowSplit | None,
) -> tuple[list[jax.Array], list[Result]]:
    """One iteration of a loop.

    Args:
        loop: Whose.
        results: `(number of the instruction, path)` of what it gives beside what it hands on.
        key: A random key, or None.
        known: By the kinds of sources: what the iteration before has handed on, what differs by iteration, and not.
        places: Where instructions stand in the stream of random numbers.
        split: How the rows of the batch lie on the mesh of a step.

    Returns:
        What it hands on, and the results, of which some are `Narrow`.
    """
    values: list[Result] = []
    for number, instruction in enumerate(loop.iterations[0]):
        sources: list[Result] = []
        for slot in loop.slots[number]:
            if slot.kind == "own":
                sources.append(wide(_at(values[slot.number], slot.path)))
            else:
                sources.append(known[slot.kind][slot.number])
        with instruction.scope(of_all=True):
            values.append(instruction.operate(key, places.get(number), sources, split))

    handed = [wide(_at(values[number], path)) for _, number, path in loop.carries]
    return handed, [_at(values[number], path) for number, path in results]


def places_of(loop: Loop) -> dict[int, list[int | None]]:
    """By the number of an instruction that draws random numbers, where it stands in their stream, by iteration."""
    draws = (i for i, instruction in enumerate(loop.iterations[0]) if instruction.place is not None)
    return {i: [span[i].place for span in loop.iterations] for i in draws}


def row_or_value(value: Operand, inputs: Inputs, read: Callable[[Operand], Result]) -> Result:
    """A value, as the row of a stack where an input is one."""
    row = inputs.row((value.source, *value.path)) if isinstance(value.source, int) else None
    return read(value) if row is None else row


def operands_of(outputs: Iterable[Output]) -> list[Operand]:
    """Those among outputs, and in bundles among them."""
    each = itertools.chain(*(v.values if isinstance(v, BundleValues) else [v] for v in outputs))
    return [value for value in each if isinstance(value, Operand)]


def reads_of(item: Instruction | Loop) -> Iterable[Operand]:
    """What must be known before it runs."""
    return item.reads if isinstance(item, Loop) else item.sources


def _at(value: Result, path: Sequence[int]) -> Result:
    for index in path:
        value = value[index]
    return value


def _runs_backwards(loop: Loop) -> bool:
    """Tell whether later iterations read what is stored first: then the scan goes from the last row to the first."""
    votes = 0
    for values in loop.each:
        if all(isinstance(v.source, int) for v in values):
            votes += 1 if values[0].source < values[-1].source else -1  # pyright: ignore[reportOperatorIssue]
    return votes < 0
