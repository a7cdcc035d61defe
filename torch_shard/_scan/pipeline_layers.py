"""The layers of a pipeline in one pass: what all stages do in one tick.

What the stages hold is stacked, and the dim of the stages split over their axis: `jax.vmap` over it is each stage on
its own devices, and a roll along it is one permute to the next (Xu et al., GSPMD, 2021, section 3.3). What differs by
layer is `(rounds, layers, stages, ...)`, where `layers` are those of one stage in one round.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from torch_shard._common.dtypes import dtype_of_sums
from torch_shard._lowering import RowSplit
from torch_shard._scan.execute import Result, StackRow, iterate, places_of, stack_of
from torch_shard._scan.instructions import Operand, wide
from torch_shard._scan.pipeline_parts import Row
from torch_shard._scan.reroll import Loop
from torch_shard._sharding import Stages

Tree = Any

Late = tuple[Operand, ...]
"""What others make of a microbatch for its backward pass: a value of each layer, or one for all."""

Saved = Mapping[Row | Late, Tree]
"""What the backward pass reads of each microbatch: of layers `(slots, layers, stages, ...)`, and what is late."""


@dataclasses.dataclass(frozen=True)
class Order:
    """When a stage works on which microbatch.

    In a pass, the stage at place `p` of the order in which it runs works on microbatch `m` in round `r` at tick
    `r * num + m + p`.

    Attributes:
        stages: Over which the layers go.
        num: Number of microbatches.
        one_by_one: Whether a backward pass begins as soon as its forward pass is done (1F1B).
    """

    stages: Stages
    num: int
    one_by_one: bool

    @property
    def ticks(self) -> int:
        """Of one pass."""
        return self.num * self.stages.repeats + self.stages.num - 1

    @property
    def slots(self) -> int:
        """For how many ticks of the forward pass its results are kept."""
        return min(2 * self.stages.num - 1, self.ticks) if self.one_by_one else self.ticks

    @property
    def ahead(self) -> int:
        """How many microbatches are between the last stage and the first on their way back."""
        return min(self.stages.num, self.num)

    @property
    def name(self) -> str:
        """Of the schedule."""
        return "1F1B" if self.one_by_one else "GPipe" if self.stages.repeats == 1 else "circular"

    @property
    def idle(self) -> float:
        """The share of the ticks in which a stage has nothing to do."""
        return (self.stages.num - 1) / self.ticks

    def work(self, tick: jax.Array | int, place: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Microbatch and round of the stages at these places, and whether there is one."""
        at, last = tick - place, self.num * self.stages.repeats - 1
        held = jnp.clip(at, 0, last)
        return held % self.num, held // self.num, (at >= 0) & (at <= last)

    def slot(self, microbatch: jax.Array, turn: jax.Array, stage: jax.Array) -> jax.Array:
        """Where the results of a forward pass are kept."""
        return (turn * self.num + microbatch + stage) % self.slots


@dataclasses.dataclass(frozen=True)
class Each:
    """One of the values that differ by layer.

    Attributes:
        array: `(rounds, layers, stages, ...)`, or `(microbatches, rounds, layers, stages, ...)`.
        differs: Whether it has the microbatches.
        row: Which result the forward pass of the same layer has saved, if it is one.
        late: What it is in what is saved, where it has the microbatches and is made as they go.
    """

    array: Tree = None
    differs: bool = False
    row: Row | None = None
    late: Late | None = None


class Across:
    """Values of all stages, on their devices."""

    def __init__(self, stages: Stages, split: RowSplit, num_rows: int) -> None:
        self.stages, self.split, self._mesh, self._num_rows = stages, split, split.mesh, num_rows
        self.iota = jnp.arange(stages.num)

    def put(self, tree: Tree, dim: int = 0, *, has_rows: bool = False) -> Tree:
        """Values with the stages in this dim; with `has_rows`, the next one has the rows of the batch."""
        rows = self.split if has_rows else None

        def placed(x: jax.Array) -> jax.Array:
            parts: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            parts[dim] = self.stages.axis
            if rows is not None and x.ndim > 1 and x.shape[1] == self._num_rows and x.shape[1] % rows.num_shards == 0:
                parts[1] = rows.axes
            return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*parts)))

        return jax.tree.map(placed, tree)

    def handed_on(self, tree: Tree, step: int) -> tuple[Tree, Tree]:
        """What stages have from the one before them, and what they have made.

        On the CPU by one gather: XLA:CPU runs a permute beside other collectives, and with few threads its devices wait
        for each other forever (jaxlib 0.10.2).
        """
        if self._mesh.devices.flat[0].platform != "cpu":
            return self.put(jax.tree.map(lambda x: jnp.roll(x, step, 0), tree), has_rows=True), tree

        def on_all(x: jax.Array) -> jax.Array:
            spec = PartitionSpec(None, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
            return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

        made = jax.tree.map(on_all, tree)
        return self.put(jax.tree.map(lambda x: on_all(jnp.roll(x, step, 0)), made), has_rows=True), made

    def of(self, tree: Tree, stage: int) -> Tree:
        """What one of them has, for all: with its rows split over the stages too, or its sequence, if they divide."""
        rows = self.split

        def taken(x: jax.Array) -> jax.Array:
            mine = self._mask(self.iota == stage, x)
            if x.dtype == bool:
                return jnp.any(mine & x, 0)
            found = jnp.where(mine, x, jnp.zeros_like(x)).sum(0, dtype=x.dtype)
            if not found.ndim or found.shape[0] != self._num_rows or self._num_rows % rows.num_shards:
                return found
            axes = {0: self.wide_axes}
            if axes[0] == rows.axes and found.ndim > 2 and found.shape[1] % self.stages.num == 0:
                axes[1] = (self.stages.axis,)
            return jax.lax.with_sharding_constraint(found, rows.along(axes, found.ndim))

        return jax.tree.map(taken, tree)

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """The axes of the rows, and that of the stages, if the rows of a microbatch divide."""
        both = (*self.split.axes, self.stages.axis)
        size = math.prod(self._mesh.shape[axis] for axis in both)
        return both if self._num_rows and self._num_rows % size == 0 else self.split.axes

    def where(self, stages: jax.Array, tree: Tree, other: Tree) -> Tree:
        """The first for these stages."""
        return jax.tree.map(lambda x, y: jnp.where(self._mask(stages, y), x, y), tree, other)

    def _mask(self, stages: jax.Array, like: jax.Array) -> jax.Array:
        return stages.reshape(-1, *[1] * (like.ndim - 1))

    def rows(self, values: Sequence[Result]) -> Tree:
        """Values of all layers, in their order, as `(rounds, layers, stages, ...)`."""
        order = self.stages.order(len(values))
        shape = (self.stages.num, self.stages.repeats, len(order) // (self.stages.num * self.stages.repeats))
        stack = _stack([values[at] for at in order])
        return self.put(jnp.moveaxis(stack.reshape(*shape, *stack.shape[1:]), 0, 2), 2)

    def stored(self, stack: jax.Array) -> jax.Array:
        """The inverse, in the order in which layers are stored."""
        return jnp.moveaxis(stack, 2, 0).reshape(-1, *stack.shape[3:])


class LayerPass:
    """A loop over layers as a pass through stages."""

    def __init__(
        self,
        loop: Loop,
        results: Sequence[Row],
        order: Order,
        across: Across,
        *,
        each: Sequence[Each],
        fixed: Sequence[Each],
        keys: jax.Array,
    ) -> None:
        self.loop, self.results, self.order, self._across = loop, results, order, across
        self.firsts = [first for first, _, _ in loop.carries]
        """What enters the first stage."""
        self._each, self._fixed, self._keys = each, fixed, keys
        stages = order.stages
        self._num = len(loop.iterations) // (stages.num * stages.repeats)
        self._place = stages.num - 1 - across.iota if loop.is_backward else across.iota
        self.last = 0 if loop.is_backward else stages.num - 1
        places = {i: of[::-1] if loop.is_backward else of for i, of in places_of(loop).items()}
        self._places = {i: across.rows(list(jnp.asarray(of, jnp.int32))) for i, of in places.items()}

    @property
    def late(self) -> list[Late]:
        """What it reads of what is made as microbatches go."""
        return list(dict.fromkeys(each.late for each in (*self._each, *self._fixed) if each.late is not None))

    def saved(self, state: "PassState") -> dict[Row | Late, Tree]:
        """What it has made, by result."""
        return dict[Row | Late, Tree](zip(self.results, state.results, strict=True))

    def start(self, first: list[Tree], saved: Saved) -> "PassState":
        """What is there before the first tick, given what enters, and what the backward pass reads."""
        stages, order = self.order.stages, self.order
        flow = self._across.put(zeros(first, stages.num), has_rows=True)
        wait = zeros(flow, order.num) if stages.repeats > 1 else []
        zero = jnp.zeros((), jnp.int32)
        made = jax.eval_shape(lambda: self._layer(flow, zero, self._work_at(zero), saved)[1])
        lead = stages.repeats if self.loop.is_backward else order.slots
        results = self._across.put(zeros(made, lead, self._num, is_sum=self.loop.is_backward), 2)
        return PassState(flow, wait, results)

    def tick(
        self, tick: jax.Array, state: "PassState", first: list[Tree], saved: Saved
    ) -> tuple["PassState", list[Tree]]:
        """Let every stage work once."""
        flow, wait = state.flow, state.wait
        enters = self._place == 0
        if wait:
            num, behind = self.order.num, tick - self.order.stages.num
            wait = write(wait, flow, behind % num)
            flow = self._across.where(enters, take(wait, tick % num), flow)
            enters &= tick < num
        flow, at = self._across.where(enters, first, flow), self._work_at(tick)

        def layer(
            carry: tuple[list[Tree], list[Tree]], number: jax.Array
        ) -> tuple[tuple[list[Tree], list[Tree]], None]:
            handed, made = self._layer(carry[0], number, at, saved)
            return (handed, self._kept(carry[1], made, number, at)), None

        with jax.named_scope("backward" if self.loop.is_backward else "forward"):
            numbers = jnp.arange(self._num)
            (outs, results), _ = jax.lax.scan(layer, (flow, state.results), numbers, reverse=self.loop.is_backward)
        flow, outs = self._across.handed_on(outs, -1 if self.loop.is_backward else 1)
        return PassState(flow, wait, results), self._across.of(outs, self.last)

    def _work_at(self, tick: jax.Array) -> "Work":
        """On which microbatch, and which of their own layers, the stages work."""
        microbatch, turn, is_one = self.order.work(tick, self._place)
        turn = self.order.stages.repeats - 1 - turn if self.loop.is_backward else turn
        return Work(tick, microbatch, turn, is_one, self.order.slot(microbatch, turn, self._across.iota))

    def _layer(self, flow: list[Tree], number: jax.Array, at: "Work", saved: Saved) -> tuple[list[Tree], list[Tree]]:
        """One layer of each stage: what it hands on, and its results, `(stages, ...)`."""

        def own(each: Each) -> Tree:
            if each.row is not None:
                return _per_stage(saved[each.row], 2, at.slot, number)
            if each.late is not None:
                return _per_stage(saved[each.late], 3, at.microbatch % self.order.ahead, at.turn, number)
            if each.differs:
                return _per_stage(each.array, 3, at.microbatch, at.turn, number)
            return self._in_round(each.array, at.turn, number)

        def same(each: Each) -> Tree:
            if each.late is not None:
                return _per_stage(saved[each.late], None, at.microbatch % self.order.ahead)
            return _per_stage(each.array, None, at.microbatch) if each.differs else each.array

        each = [own(e) for e in self._each]
        places = {i: self._in_round(x, at.turn, number) for i, x in self._places.items()}
        fixed = [same(f) for f in self._fixed]
        axes = [0 if f.differs else None for f in self._fixed]

        def stage(
            flow: list[Tree], each: list[Tree], fixed: list[Tree], drawn: tuple[jax.Array, dict[int, Any]]
        ) -> Any:
            key, places = drawn
            known = {"carry": flow, "each": each, "fixed": fixed}
            handed, results = iterate(self.loop, self.results, key, known, places, self._across.split)
            return handed, list(map(wide, results))

        mapped = jax.vmap(stage, in_axes=(0, 0, axes, 0), spmd_axis_name=self.order.stages.axis)
        handed, results = mapped(flow, each, fixed, (self._keys[at.microbatch], places))
        return self._across.put(handed, has_rows=True), self._across.put(results)

    def _in_round(self, stack: jax.Array, turn: jax.Array, number: jax.Array) -> jax.Array:
        """The values of one layer of each stage, `(stages, ...)`."""
        if self.order.stages.repeats == 1:
            return take(stack[0], number)
        return _per_stage(stack, 2, turn, number)

    def _kept(self, held: list[Tree], made: list[Tree], number: jax.Array, at: "Work") -> list[Tree]:
        """The results with those of one more layer of each stage."""
        if not self.loop.is_backward:
            slot, zero = (at.tick % self.order.slots).astype(number.dtype), jnp.zeros((), number.dtype)

            def write(x: jax.Array, new: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice(x, new[None, None], (slot, number, *[zero] * new.ndim))

            return jax.tree.map(write, held, made)
        made = self._across.where(at.is_one, made, jax.tree.map(jnp.zeros_like, made))
        if self.order.stages.repeats > 1:
            each = jax.vmap(lambda x, new, turn: x.at[turn, number].add(new), in_axes=(2, 0, 0), out_axes=2)
            return jax.tree.map(lambda x, new: each(x, new, at.turn), held, made)

        def add(x: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(x, (take(x[0], number) + new)[None], number, 1)

        return jax.tree.map(add, held, made)


class Work(NamedTuple):
    """What the stages do in a tick, each `(stages,)`: microbatch, round, whether it is one at all, and its slot."""

    tick: jax.Array
    microbatch: jax.Array
    turn: jax.Array
    is_one: jax.Array
    slot: jax.Array


class PassState(NamedTuple):
    """What stages have been handed, what waits for its next round, and the results so far.

    Results are `(slots, layers, stages, ...)` of the forward pass, sums `(rounds, layers, stages, ...)` of the backward
    pass.
    """

    flow: list[Tree]
    wait: list[Tree]
    results: list[Tree]


def take(tree: Tree, index: jax.Array) -> Tree:
    """One of `(num, ...)`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def write(tree: Tree, new: Tree, index: jax.Array) -> Tree:
    """`(num, ...)` with others at this index."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), tree, new)


def zeros(tree: Tree, *lead: int, is_sum: bool = False) -> Tree:
    """Zeros with these dims before those of arrays; as wide as sums of them are."""
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), dtype_of_sums(x.dtype) if is_sum else x.dtype), tree)


def _per_stage(stack: jax.Array, dim: int | None, *index: jax.Array) -> jax.Array:
    """For each stage one of its own values, `(stages, ...)`.

    Args:
        stack: Of all.
        dim: Which of its dims has the stages, if one has.
        *index: `(stages,)`, or a number for all, into the leading dims.
    """

    def one(x: jax.Array, *index: jax.Array) -> jax.Array:
        return x.at[index].get(mode="promise_in_bounds")

    return jax.vmap(one, in_axes=(dim, *(0 if at.ndim else None for at in index)))(stack, *index)


def _stack(values: Sequence[Result]) -> jax.Array:
    """Values as one array: without a copy, where they are rows of a stack at equal distances."""
    rows = [value for value in values if isinstance(value, StackRow) and value.stack is values[0].stack]
    if len(rows) == len(values) > 1:
        starts = [row.index for row in rows]
        apart = starts[1] - starts[0]
        stack = rows[0].stack
        if starts == list(range(starts[0], len(stack), apart)) and len(stack) == apart * len(rows):
            return stack.reshape(len(rows), apart, *stack.shape[1:])[:, starts[0]]
    return stack_of(values)
