"""A pipeline as a function of JAX arrays: microbatches go through its stages, forward and backward, by a schedule."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from torch_shard._common.dtypes import dtype_of_sums
from torch_shard._lowering import RowSplit, matmul_precision
from torch_shard._scan.execute import Inputs, Result, StackRow, array_of, execute, operands_of, row_or_value
from torch_shard._scan.instructions import Operand
from torch_shard._scan.pipeline_layers import Across, Each, LayerPass, Order, PassState, Saved, take
from torch_shard._scan.pipeline_parts import Item, Parts, Row
from torch_shard._scan.reroll import Loop

Tree = Any


class Microbatched(Protocol):
    """The inputs of a program for several microbatches."""

    @property
    def num_rows(self) -> int:
        """Of a microbatch; 0 if there are none."""
        ...

    def at(self, index: jax.Array) -> Inputs:
        """Those of one of them."""
        ...

    def stack(self, number: int) -> jax.Array | None:
        """`(num, ...)`, an input of all of them; None for what is the same for each."""
        ...


Known = Callable[[jax.Array], dict[Operand, Result]]
"""Gives further values for a microbatch."""


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A loop over layers, and what it is given and gives.

    Attributes:
        run: The pass.
        firsts: What enters the first stage.
        finals: What leaves the last one, as far as others read it: its number among what layers hand on.
    """

    run: LayerPass
    firsts: list[Operand]
    finals: dict[Operand, int]


class _Middle(NamedTuple):
    """What is made of one microbatch between the passes: outputs, terms of sums, and what the way back reads."""

    kept: list[Tree]
    sums: list[Tree]
    firsts: list[Tree]
    late: list[Tree]


class PipelineRun:
    """One run of a pipeline, in a program that is traced.

    Args:
        parts: Of the loss.
        order: When each stage works on what.
        rows: How the rows of the batch lie on the mesh, which has the axis of the stages.
        keys: A random key for each microbatch.
        inputs: Of all microbatches.
        place: Lays out a sum of gradients of layers, `(rounds, layers, stages, ...)`, given the layers' operands.
    """

    def __init__(
        self,
        parts: Parts,
        order: Order,
        rows: RowSplit,
        *,
        keys: jax.Array,
        inputs: Microbatched,
        place: Callable[[Sequence[Operand], Tree], Tree],
    ) -> None:
        self._parts, self._order, self._keys, self._inputs, self._place = parts, order, keys, inputs, place
        self._zero = jnp.zeros((), jnp.int32)
        self._same = inputs.at(self._zero)
        self._once: dict[Operand, Result] = {}
        self._stacks: dict[Operand, Tree] = {}
        """Values of all microbatches, `(num, ...)`."""
        self._across = Across(order.stages, rows, inputs.num_rows)
        self._wide = dataclasses.replace(rows, axes=self._across.wide_axes(rows.axes))
        """Beside the layers, rows are split over the stages too, as far as they divide."""

    def run(self) -> tuple[list[Tree], list[Result]]:
        """The outputs of each microbatch, `(num, ...)`, and the sums of the others."""
        parts = self._parts
        readers = ("before", "forward", "middle", "backward", "after", "tail")
        outputs = [*operands_of(parts.given), *parts.sums]
        with matmul_precision():
            wanted = parts.needed(["once"], readers, outputs)
            once = execute(parts.once, wanted, self._keys[0], self._same, split=self._across.split)
            self._once = dict(zip(wanted, once, strict=True))
            self._stacks |= self._each(parts.before, parts.needed(["before"], readers[1:], outputs), [])[0]
            sums = self._one_by_one() if self._order.one_by_one else self._forward_first()
            sums |= {v: self._sum_of(v) for v in parts.sums if v not in sums}
            given = [self._stacked(v) if isinstance(v, Operand) else v for v in parts.given]
            known = {**self._once, **sums}
            split = self._across.split
            return given, execute(parts.tail, parts.summed, self._keys[0], self._same, split=split, known=known)

    # Schedules

    def _forward_first(self) -> dict[Operand, Result]:
        """All forward passes, then all backward passes (GPipe)."""
        parts, ticks = self._parts, jnp.arange(self._order.ticks)
        forward = self._forward()
        first = self._firsts(forward, self._zero)
        state, outs = jax.lax.scan(functools.partial(self._ahead, forward), forward.run.start(first, {}), ticks)
        saved: Saved = {**dict(zip(forward.run.results, state.results, strict=True))}
        self._stacks |= {v: self._leaving(outs[at]) for v, at in forward.finals.items()}
        wanted = [*parts.kept, *parts.handed]
        found, sums = self._each(parts.middle, wanted, parts.middle_sums, functools.partial(self._rows, saved))
        self._stacks |= found
        if parts.backward is None:
            return dict(sums)
        backward = self._backward()

        def back(state: PassState, tick: jax.Array) -> tuple[PassState, list[Tree]]:
            return self._back(backward, saved, state, tick, first=self._firsts(backward, tick % self._order.num))

        state, outs = jax.lax.scan(back, backward.run.start(self._firsts(backward, self._zero), saved), ticks)
        return self._end(backward, outs, state.results, sums)

    def _one_by_one(self) -> dict[Operand, Result]:
        """Each backward pass as soon as its forward pass is done (1F1B).

        The first ticks are of forward passes alone, and the last ones of backward passes; between them each stage runs
        one of both, of other microbatches.
        """
        parts, num, fill = self._parts, self._order.num, self._order.stages.num - 1
        forward, backward = self._forward(), self._backward()
        ahead = functools.partial(self._ahead, forward)
        start = forward.run.start(self._firsts(forward, self._zero), {})
        state, _ = jax.lax.scan(ahead, start, jnp.arange(fill))

        def saved_in(state: PassState) -> Saved:
            return {**dict(zip(forward.run.results, state.results, strict=True))}

        def middle(saved: Saved, outs: list[Tree], index: jax.Array) -> _Middle:
            known = {v: outs[at] for v, at in forward.finals.items()} | self._rows(saved, index)
            return self._middle(backward, index, known)

        def read(state: PassState, late: list[Tree]) -> Saved:
            return {**saved_in(state), **dict(zip(backward.run.late, late, strict=True))}

        def both(state: Tree, index: jax.Array) -> tuple[Tree, Tree]:
            state, sums, late, behind = state
            state, outs = ahead(state, index + fill)
            found = middle(saved_in(state), outs, index)
            late = _put(late, found.late, index % self._order.ahead)
            behind, gone = self._back(backward, read(state, late), behind, index, first=found.firsts)
            return (state, _added(sums, found.sums), late, behind), (found.kept, gone)

        shapes = jax.eval_shape(middle, saved_in(state), jax.eval_shape(ahead, state, self._zero)[1], self._zero)
        none, late = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes.firsts, shapes.late))
        late = jax.tree.map(lambda x: jnp.zeros((self._order.ahead, *x.shape), x.dtype), late)
        start = (state, _wide_zeros(shapes.sums), late, backward.run.start(none, read(state, late)))
        (state, totals, late, behind), (kept, gone) = jax.lax.scan(both, start, jnp.arange(num))
        self._stacks |= dict(zip(parts.kept, kept, strict=True))

        def drain(behind: PassState, tick: jax.Array) -> tuple[PassState, list[Tree]]:
            return self._back(backward, read(state, late), behind, tick, first=none)

        behind, rest = jax.lax.scan(drain, behind, num + jnp.arange(fill))
        outs = jax.tree.map(lambda *x: jnp.concatenate(x), gone, rest)
        return self._end(backward, outs, behind.results, dict(zip(parts.middle_sums, totals, strict=True)))

    def _middle(self, backward: _Pass, index: jax.Array, known: dict[Operand, Result]) -> _Middle:
        """What is made of one microbatch between the passes of its layers."""
        parts, late = self._parts, backward.run.late
        groups = [parts.kept, parts.middle_sums, backward.firsts, *late]
        found = iter(self._part(parts.middle, list(itertools.chain(*groups)), index, known))
        kept, sums, firsts, *each = ([next(found) for _ in group] for group in groups)
        return _Middle(kept, sums, firsts, [x[0] if len(x) == 1 else self._across.rows(x) for x in each])

    def _ahead(self, layers: _Pass, state: PassState, tick: jax.Array) -> tuple[PassState, list[Tree]]:
        """A tick of the forward pass: what leaves the last stage."""
        return layers.run.tick(tick, state, self._firsts(layers, tick % self._order.num), {})

    def _back(
        self, layers: _Pass, saved: Saved, state: PassState, tick: jax.Array, *, first: list[Tree]
    ) -> tuple[PassState, list[Tree]]:
        """A tick of the backward pass: what leaves the first stage."""
        state, outs = layers.run.tick(tick, state, first, saved)
        sums = [self._placed(row, total) for row, total in zip(layers.run.results, state.results, strict=True)]
        return state._replace(results=sums), outs

    def _end(
        self, backward: _Pass, outs: list[Tree], totals: list[Tree], sums: dict[Operand, Tree]
    ) -> dict[Operand, Result]:
        """What comes after the backward pass; all sums."""
        parts = self._parts
        self._stacks |= {v: self._leaving(outs[at]) for v, at in backward.finals.items()}
        found = dict[Operand, Result](sums)
        stacks = dict(zip(backward.run.results, map(self._across.stored, totals), strict=True))
        places = self._order.stages.places(len(parts.forward.iterations))
        rest = list[Operand]()
        for value in parts.sums:
            if parts.maker(value) == "backward" and value not in backward.finals:
                row, layer = parts.layer_of(value)
                found[value] = StackRow(stacks[row], places[layer])
            elif parts.maker(value) in ("backward", "after"):
                rest.append(value)
        return found | self._each(parts.after, [], rest)[1]

    def _placed(self, row: Row, total: Tree) -> Tree:
        number, path = row
        return self._place([Operand(span[number], path) for span in self._parts.backward_layers], total)

    # What runs beside the layers

    def _each(
        self, items: list[Item], wanted: list[Operand], sums: list[Operand], known: Known = lambda index: {}
    ) -> tuple[dict[Operand, Tree], dict[Operand, Tree]]:
        """Run a part for each microbatch: values of each, and sums over all of them."""
        if not wanted and not sums:
            return {}, {}

        def one(totals: list[Tree], index: jax.Array) -> tuple[list[Tree], list[Tree]]:
            found = self._part(items, [*wanted, *sums], index, known(index))
            return _added(totals, found[len(wanted) :]), found[: len(wanted)]

        shapes = jax.eval_shape(lambda: self._part(items, sums, self._zero, known(self._zero)))
        totals, values = jax.lax.scan(one, _wide_zeros(shapes), jnp.arange(self._order.num))
        return dict(zip(wanted, values, strict=True)), dict(zip(sums, totals, strict=True))

    def _part(
        self, items: list[Item], wanted: list[Operand], index: jax.Array, known: dict[Operand, Result]
    ) -> list[Tree]:
        """What a part makes of one microbatch."""
        known = {**self._once, **{value: take(stack, index) for value, stack in self._stacks.items()}, **known}
        inputs, key = self._inputs.at(index), self._keys[index]
        return list(map(array_of, execute(items, wanted, key, inputs, split=self._wide, known=known)))

    def _rows(self, saved: Saved, index: jax.Array) -> dict[Operand, Result]:
        """What the layers have made of one microbatch, as far as others read it."""
        stages = self._order.stages
        slots = self._order.slot(index, jnp.arange(stages.repeats)[:, None], self._across.iota)
        places = stages.places(len(self._parts.forward.iterations))
        found: dict[Operand, Result] = {}
        stacks = dict[Row, Tree]()

        def of_all(x: jax.Array) -> jax.Array:
            """`(rounds, layers, stages, ...)` of `(slots, layers, stages, ...)`."""
            return jax.vmap(lambda own, at: own[at], in_axes=(2, 1), out_axes=2)(x, slots)

        for value in self._parts.seen:
            row, layer = self._parts.layer_of(value)
            if row not in stacks:
                stacks[row] = self._across.stored(jax.tree.map(of_all, saved[row]))
            found[value] = StackRow(stacks[row], places[layer])
        return found

    # The layers

    def _forward(self) -> _Pass:
        parts = self._parts
        return self._pass(parts.forward, list(dict.fromkeys([*parts.saved, *parts.rows_of(parts.seen)])), parts.finals)

    def _backward(self) -> _Pass:
        parts, loop = self._parts, self._parts.backward
        assert loop is not None
        made = [v for v in [*parts.reads("after"), *parts.sums] if parts.maker(v) == "backward"]
        finals = {v: at for v in made if (at := parts.last_of(v, loop)) is not None}
        return self._pass(loop, parts.rows_of(v for v in made if v not in finals), finals)

    def _pass(self, loop: Loop, results: list[Row], finals: dict[Operand, int]) -> _Pass:
        fixed = [self._fixed_of(v) for v in loop.fixed]
        each = [self._each_of(values[::-1] if loop.is_backward else values) for values in loop.each]
        run = LayerPass(loop, results, self._order, self._across, each=each, fixed=fixed, keys=self._keys)
        return _Pass(run, [first for first, _, _ in loop.carries], finals)

    def _fixed_of(self, value: Operand) -> Each:
        """What does not differ by layer."""
        if self._is_late(value):
            return Each(late=(value,), differs=True)
        stack = self._stack_of(value)
        return Each(self._value(value)) if stack is None else Each(stack, differs=True)

    def _is_late(self, value: Operand) -> bool:
        """Whether it is made of each microbatch before its way back begins."""
        return self._order.one_by_one and self._parts.maker(value) in ("middle", "forward")

    def _each_of(self, values: Sequence[Operand]) -> Each:
        """What differs by layer, in their order."""
        row = self._parts.row_of(values[0])
        if row is not None and row[0] in self._parts.saved and all(self._parts.maker(v) == "forward" for v in values):
            return Each(row=row[0])
        if any(map(self._is_late, values)):
            return Each(late=tuple(values), differs=True)
        if all(self._stack_of(v) is None for v in values):
            return Each(self._across.rows([row_or_value(v, self._same, self._value) for v in values]))
        stacks = [self._stacked(v) for v in values]
        return Each(jax.vmap(lambda *rows: self._across.rows(rows))(*stacks), differs=True)

    # Values

    def _stack_of(self, value: Operand) -> Tree | None:
        """`(num, ...)`; None for what is the same for all microbatches."""
        if value in self._stacks:
            return self._stacks[value]
        return self._inputs.stack(value.source) if isinstance(value.source, int) and not value.path else None

    def _value(self, value: Operand) -> Tree:
        """What is the same for all."""
        known = self._once.get(value)
        assert known is not None or isinstance(value.source, int)
        return array_of(self._same[(value.source, *value.path)] if known is None else known)  # pyright: ignore[reportArgumentType]

    def _stacked(self, value: Operand) -> Tree:
        stack = self._stack_of(value)
        if stack is not None:
            return stack
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self._order.num, *jnp.shape(x))), self._value(value))

    def _firsts(self, layers: _Pass, index: jax.Array) -> list[Tree]:
        """What enters the first stage, of one microbatch."""
        stacks = [(v, self._stack_of(v)) for v in layers.firsts]
        return [self._value(v) if stack is None else take(stack, index) for v, stack in stacks]

    def _leaving(self, outs: Tree) -> Tree:
        """What leaves the last stage in all ticks, of the microbatches: it is there in the last ticks."""
        return jax.tree.map(lambda x: x[len(x) - self._order.num :], outs)

    def _sum_of(self, value: Operand) -> Tree:
        """The sum over microbatches of what neither the layers make, nor what comes after them."""
        stack = self._stack_of(value)
        if stack is None:
            return jax.tree.map(lambda x: x * self._order.num, self._value(value))
        return jax.tree.map(lambda x: x.sum(0, dtype=dtype_of_sums(x.dtype)), stack)


def _wide_zeros(shapes: list[Tree]) -> list[Tree]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype_of_sums(x.dtype)), shapes)


def _put(held: list[Tree], new: list[Tree], at: jax.Array) -> list[Tree]:
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, at, 0), held, new)


def _added(totals: list[Tree], values: list[Tree]) -> list[Tree]:
    return jax.tree.map(jnp.add, totals, values)
