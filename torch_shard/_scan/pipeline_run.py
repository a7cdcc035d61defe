"""A pipeline as a function of JAX arrays: microbatches go through its stages, forward and backward, by a schedule."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from torch_shard._common.dtypes import dtype_of_sums
from torch_shard._lowering import RowSplit, matmul_precision
from torch_shard._scan.execute import Inputs, Result, StackRow, array_of, execute, operands_of, row_or_value
from torch_shard._scan.instructions import Operand
from torch_shard._scan.pipeline_layers import Across, Each, LayerPass, Order, PassState, Saved, take, write, zeros
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


class PipelineRun:
    """One run of a pipeline, in a program that is traced.

    Args:
        parts: Of the loss.
        order: When each stage works on what.
        rows: How the rows of the batch lie on the mesh, which has the axis of the stages.
        keys: A random key for each microbatch.
        inputs: Of all microbatches.
        place: Lays out a sum of gradients of layers, `(rounds, layers, stages, ...)`, given the first layer's operand.
    """

    def __init__(
        self,
        parts: Parts,
        order: Order,
        rows: RowSplit,
        *,
        keys: jax.Array,
        inputs: Microbatched,
        place: Callable[[Operand, jax.Array], jax.Array],
    ) -> None:
        self._parts, self._order, self._keys, self._inputs, self._place = parts, order, keys, inputs, place
        self._zero = jnp.zeros((), jnp.int32)
        self._same = inputs.at(self._zero)
        self._once: dict[Operand, Result] = {}
        self._stacks: dict[Operand, Tree] = {}
        """Values of all microbatches, `(num, ...)`."""
        self._across = Across(order.stages, rows, inputs.num_rows)
        self._wide = dataclasses.replace(rows, axes=self._across.wide_axes)
        """Beside the layers, rows are split over the stages too, as far as they divide."""
        self._places = order.stages.places(len(parts.forward.iterations))

    def run(self) -> tuple[list[Tree], list[Result]]:
        """The outputs of each microbatch, `(num, ...)`, and the sums of the others."""
        parts = self._parts
        readers = ("before", "forward", "middle", "backward", "after", "tail")
        outputs, split = [*operands_of(parts.given), *parts.sums], self._across.split
        with matmul_precision():
            wanted = parts.needed("once", readers, outputs)
            once = execute(parts.once, wanted, self._keys[0], self._same, split=split)
            self._once = dict(zip(wanted, once, strict=True))
            self._stacks |= self._each(parts.before, parts.needed("before", readers[1:], outputs), [])[0]
            sums = self._one_by_one() if self._order.one_by_one else self._forward_first()
            sums |= {v: self._sum_of(v) for v in parts.sums if v not in sums}
            given = [self._stacked(v) if isinstance(v, Operand) else v for v in parts.given]
            known = {**self._once, **sums}
            return given, execute(parts.tail, parts.summed, self._keys[0], self._same, split=split, known=known)

    # Schedules

    def _forward_first(self) -> dict[Operand, Result]:
        """All forward passes, then all backward passes (GPipe)."""
        parts, ticks = self._parts, jnp.arange(self._order.ticks)
        forward = self._pass(parts.forward, parts.made)
        start = forward.start(self._firsts(forward, self._zero), {})
        state, outs = jax.lax.scan(functools.partial(self._ahead, forward), start, ticks)
        saved = forward.saved(state)
        self._stacks |= {v: self._leaving(outs[at]) for v, at in parts.finals.items()}
        wanted = [*parts.kept, *parts.handed]
        found, sums = self._each(parts.middle, wanted, parts.middle_sums, functools.partial(self._rows, saved))
        self._stacks |= found
        if parts.backward is None:
            return dict(sums)
        backward = self._pass(parts.backward, parts.totals)

        def back(state: PassState, tick: jax.Array) -> tuple[PassState, list[Tree]]:
            return self._back(backward, saved, state, tick, first=self._firsts(backward, tick % self._order.num))

        state, outs = jax.lax.scan(back, backward.start(self._firsts(backward, self._zero), saved), ticks)
        return self._end(backward, outs, state.results, sums)

    def _one_by_one(self) -> dict[Operand, Result]:
        """Each backward pass as soon as its forward pass is done (1F1B).

        The first ticks are of forward passes alone, and the last ones of backward passes; between them each stage runs
        one of both, of other microbatches.
        """
        parts, num, fill = self._parts, self._order.num, self._order.stages.num - 1
        assert parts.backward is not None
        forward, backward = self._pass(parts.forward, parts.made), self._pass(parts.backward, parts.totals)
        ahead = functools.partial(self._ahead, forward)
        start = forward.start(self._firsts(forward, self._zero), {})
        state, _ = jax.lax.scan(ahead, start, jnp.arange(fill))

        def middle(saved: Saved, outs: list[Tree], index: jax.Array) -> list[list[Tree]]:
            """Of one microbatch between the passes: outputs, terms of sums, and what the way back reads."""
            known = {v: outs[at] for v, at in parts.finals.items()} | self._rows(saved, index)
            groups = [parts.kept, parts.middle_sums, backward.firsts, *backward.late]
            found = iter(self._part(parts.middle, list(itertools.chain(*groups)), index, known))
            kept, sums, firsts, *each = ([next(found) for _ in group] for group in groups)
            return [kept, sums, firsts, [x[0] if len(x) == 1 else self._across.rows(x) for x in each]]

        def read(state: PassState, late: list[Tree]) -> Saved:
            return {**forward.saved(state), **dict(zip(backward.late, late, strict=True))}

        def both(state: Tree, index: jax.Array) -> tuple[Tree, Tree]:
            state, sums, late, behind = state
            state, outs = ahead(state, index + fill)
            kept, terms, firsts, new = middle(forward.saved(state), outs, index)
            late = write(late, new, index % self._order.ahead)
            behind, gone = self._back(backward, read(state, late), behind, index, first=firsts)
            return (state, jax.tree.map(jnp.add, sums, terms), late, behind), (kept, gone)

        outs = jax.eval_shape(ahead, state, self._zero)[1]
        _, terms, firsts, late = jax.eval_shape(middle, forward.saved(state), outs, self._zero)
        none, late = zeros(firsts), zeros(late, self._order.ahead)
        start = (state, zeros(terms, is_sum=True), late, backward.start(none, read(state, late)))
        (state, totals, late, behind), (kept, gone) = jax.lax.scan(both, start, jnp.arange(num))
        self._stacks |= dict(zip(parts.kept, kept, strict=True))

        def drain(behind: PassState, tick: jax.Array) -> tuple[PassState, list[Tree]]:
            return self._back(backward, read(state, late), behind, tick, first=none)

        behind, rest = jax.lax.scan(drain, behind, num + jnp.arange(fill))
        outs = jax.tree.map(lambda *x: jnp.concatenate(x), gone, rest)
        return self._end(backward, outs, behind.results, dict(zip(parts.middle_sums, totals, strict=True)))

    def _ahead(self, layers: LayerPass, state: PassState, tick: jax.Array) -> tuple[PassState, list[Tree]]:
        """A tick of the forward pass: what leaves the last stage."""
        return layers.tick(tick, state, self._firsts(layers, tick % self._order.num), {})

    def _back(
        self, layers: LayerPass, saved: Saved, state: PassState, tick: jax.Array, *, first: list[Tree]
    ) -> tuple[PassState, list[Tree]]:
        """A tick of the backward pass: what leaves the first stage."""
        state, outs = layers.tick(tick, state, first, saved)
        pairs = zip(layers.results, state.results, strict=True)
        span = layers.loop.iterations[-1]  # of the first layer
        sums = [self._place(Operand(span[number], path), total) for (number, path), total in pairs]
        return state._replace(results=sums), outs

    def _end(
        self, backward: LayerPass, outs: list[Tree], totals: list[Tree], sums: dict[Operand, Tree]
    ) -> dict[Operand, Result]:
        """What comes after the backward pass; all sums."""
        parts = self._parts
        self._stacks |= {v: self._leaving(outs[at]) for v, at in parts.ends.items()}
        found = dict[Operand, Result](sums)
        stacks = dict(zip(backward.results, map(self._across.stored, totals), strict=True))
        rest = list[Operand]()
        for value in parts.sums:
            if parts.maker(value) == "backward" and value not in parts.ends:
                row, layer = parts.row_of(value)
                found[value] = StackRow(stacks[row], self._places[layer])
            elif parts.maker(value) in ("backward", "after"):
                rest.append(value)
        return found | self._each(parts.after, [], rest)[1]

    # What runs beside the layers

    def _each(
        self, items: list[Item], wanted: list[Operand], sums: list[Operand], known: Known = lambda index: {}
    ) -> tuple[dict[Operand, Tree], dict[Operand, Tree]]:
        """Run a part for each microbatch: values of each, and sums over all of them."""
        if not wanted and not sums:
            return {}, {}

        def one(totals: list[Tree], index: jax.Array) -> tuple[list[Tree], list[Tree]]:
            found = self._part(items, [*wanted, *sums], index, known(index))
            return jax.tree.map(jnp.add, totals, found[len(wanted) :]), found[: len(wanted)]

        shapes = jax.eval_shape(lambda: self._part(items, sums, self._zero, known(self._zero)))
        totals, values = jax.lax.scan(one, zeros(shapes, is_sum=True), jnp.arange(self._order.num))
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
        of_all = jax.vmap(lambda own, at: own[at], in_axes=(2, 1), out_axes=2)
        """`(rounds, layers, stages, ...)` of `(slots, layers, stages, ...)`."""
        seen = self._parts.seen
        stacks = {row: self._across.stored(of_all(saved[row], slots)) for row in self._parts.rows_of(seen)}
        rows = {value: self._parts.row_of(value) for value in seen}
        return {value: StackRow(stacks[row], self._places[layer]) for value, (row, layer) in rows.items()}

    # The layers

    def _pass(self, loop: Loop, results: list[Row]) -> LayerPass:
        fixed = [self._fixed_of(v) for v in loop.fixed]
        each = [self._each_of(values[::-1] if loop.is_backward else values) for values in loop.each]
        return LayerPass(loop, results, self._order, self._across, each=each, fixed=fixed, keys=self._keys)

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
        if all(self._parts.maker(v) == "forward" for v in values):
            return Each(row=self._parts.row_of(values[0])[0])
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
        same = self._value(value)
        return jnp.broadcast_to(same, (self._order.num, *jnp.shape(same)))

    def _firsts(self, layers: LayerPass, index: jax.Array) -> list[Tree]:
        """What enters the first stage, of one microbatch."""
        stacks = [(v, self._stack_of(v)) for v in layers.firsts]
        return [self._value(v) if stack is None else take(stack, index) for v, stack in stacks]

    def _leaving(self, outs: jax.Array) -> jax.Array:
        """What leaves the last stage in all ticks, of the microbatches: it is there in the last ticks."""
        return outs[len(outs) - self._order.num :]

    def _sum_of(self, value: Operand) -> Tree:
        """The sum over microbatches of what neither the layers make, nor what comes after them."""
        stack = self._stack_of(value)
        if stack is None:
            return self._value(value) * self._order.num
        return stack.sum(0, dtype=dtype_of_sums(stack.dtype))
