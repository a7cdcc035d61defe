"""The layers of a pipeline in one pass: what all stages do in one tick.

What the stages hold is stacked, `(stages, ...)`, and split over their axis: `jax.vmap` over stages is each stage on its
own devices, and a roll along them is one permute to the next (Xu et al., GSPMD, 2021, section 3.3).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_shard._lowering import current_rows
from torch_shard._scan.execute import Result, StackRow, iterate, places_of, stack_of
from torch_shard._scan.instructions import Operand
from torch_shard._scan.pipeline_parts import Row
from torch_shard._scan.reroll import Loop
from torch_shard._sharding import Stages

Tree = Any


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
    """One of the values that differ by iteration of a loop.

    Attributes:
        kind: `same` for all microbatches, `(stages, rounds, iterations, ...)`; `differs`, `(microbatches, stages,
            rounds, iterations, ...)`; or `saved` by the forward pass of the same layer.
        array: Of them, where it is not saved.
        row: What was saved.
    """

    kind: Literal["same", "differs", "saved"]
    array: Tree = None
    row: Row | None = None


class Across:
    """Values of all stages, on their devices."""

    def __init__(self, stages: Stages, mesh: Mesh, num_rows: int) -> None:
        self.stages, self._mesh, self._num_rows = stages, mesh, num_rows
        self.iota = jnp.arange(stages.num)

    def put(self, tree: Tree) -> Tree:
        """`(stages, ...)`, with the rows of the batch where they were."""
        rows = current_rows()

        def placed(x: jax.Array) -> jax.Array:
            parts: list[Any] = [self.stages.axis, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)]
            if rows is not None and x.ndim > 1 and x.shape[1] == self._num_rows and x.shape[1] % rows.num_shards == 0:
                parts[1] = rows.axes
            return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*parts)))

        return jax.tree.map(placed, tree)

    def of(self, tree: Tree, stage: int) -> Tree:
        """What one of them has, for all: with its rows split over the stages too, if they divide."""
        rows = current_rows()

        def taken(x: jax.Array) -> jax.Array:
            mine = self._mask(self.iota == stage, x)
            if x.dtype == bool:
                return jnp.any(mine & x, 0)
            found = jnp.where(mine, x, jnp.zeros_like(x)).sum(0, dtype=x.dtype)
            if rows is None or not found.ndim or found.shape[0] != self._num_rows:
                return found
            wide = dataclasses.replace(rows, axes=self.wide_axes(rows.axes))
            return jax.lax.with_sharding_constraint(found, wide.sharding(0, found.ndim))

        return jax.tree.map(taken, tree)

    def wide_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of the rows, and that of the stages, if the rows of a microbatch divide."""
        both = (*axes, self.stages.axis)
        size = functools.reduce(lambda num, axis: num * self._mesh.shape[axis], both, 1)
        return both if self._num_rows and self._num_rows % size == 0 else axes

    def where(self, stages: jax.Array, tree: Tree, other: Tree) -> Tree:
        """The first for these stages."""
        return jax.tree.map(lambda x, y: jnp.where(self._mask(stages, y), x, y), tree, other)

    def _mask(self, stages: jax.Array, like: jax.Array) -> jax.Array:
        return stages.reshape(-1, *[1] * (like.ndim - 1))

    def rows(self, values: Sequence[Result]) -> Tree:
        """Values of all iterations, in the order of the layers, as `(stages, rounds, iterations, ...)`."""
        order = self.stages.order(len(values))
        shape = (self.stages.num, self.stages.repeats, len(order) // (self.stages.num * self.stages.repeats))
        stack = _stack([values[at] for at in order])
        return self.put(jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), stack))

    def layers(self, tree: Tree) -> Tree:
        """The inverse: `(layers, ...)` in their order."""
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[3:]), tree)


class LayerPass:
    """A loop over layers as a pass through stages.

    Args:
        loop: There or back.
        results: What each layer is to give beside what it hands on.
        order: When each stage works on what.
        across: The stages.
        each: What differs by iteration.
        fixed: What does not, and whether it is `(microbatches, ...)`.
        keys: A random key for each microbatch.
    """

    def __init__(
        self,
        loop: Loop,
        results: Sequence[Row],
        order: Order,
        across: Across,
        *,
        each: Sequence[Each],
        fixed: Sequence[tuple[Tree, bool]],
        keys: jax.Array,
    ) -> None:
        self._loop, self.results, self.order, self.across = loop, results, order, across
        self._each, self._fixed, self._keys = each, fixed, keys
        num = order.stages.num
        self.place = across.iota[::-1] if loop.is_backward else across.iota
        self.first, self.last = (num - 1, 0) if loop.is_backward else (0, num - 1)
        places = {i: of[::-1] if loop.is_backward else of for i, of in places_of(loop).items()}
        self._places = {i: across.rows(list(jnp.asarray(of, jnp.int32))) for i, of in places.items()}

    def _work_at(self, tick: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """On which microbatch, and which of their own layers, the stages work, and whether they do."""
        microbatch, turn, is_one = self.order.work(tick, self.place)
        return microbatch, self.order.stages.repeats - 1 - turn if self._loop.is_backward else turn, is_one

    def start(self, first: list[Tree]) -> tuple[list[Tree], list[Tree]]:
        """What lies at the stages before the first tick, given what enters; and what waits for its next round."""
        num = self.order.stages.num
        flow = jax.tree.map(lambda x: jnp.zeros((num, *x.shape), x.dtype), first)
        wait = jax.tree.map(lambda x: jnp.zeros((self.order.num, *x.shape), x.dtype), flow)
        return self.across.put(flow), wait if self.order.stages.repeats > 1 else []

    def tick(
        self, tick: jax.Array, state: tuple[list[Tree], list[Tree]], first: list[Tree], saved: dict[Row, Tree]
    ) -> tuple[tuple[list[Tree], list[Tree]], list[Tree], list[Tree]]:
        """Let every stage work once.

        Args:
            tick: Its number, of this pass.
            state: What the stages have been handed, and what waits.
            first: What enters the first stage.
            saved: Of the forward pass, `(slots, stages, iterations, ...)`.

        Returns:
            The next state, what each stage hands on, and its results, `(stages, iterations, ...)`.
        """
        flow, wait = state
        microbatch, turn, _ = self._work_at(tick)
        enters = self.place == 0
        if wait:
            num, behind = self.order.num, tick - self.order.stages.num
            wait = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, behind % num, 0), wait, flow)
            flow = self.across.where(enters, jax.tree.map(lambda x: take(x, tick % num), wait), flow)
            enters &= tick < self.order.num
        flow = self.across.where(enters, first, flow)
        slots = self.order.slot(microbatch, turn, self.across.iota)
        outs, results = self._work(flow, microbatch, turn, {row: per_stage(x, slots, 1) for row, x in saved.items()})
        step = -1 if self._loop.is_backward else 1
        handed = self.across.put(jax.tree.map(lambda x: jnp.roll(x, step, 0), outs))
        return (handed, wait), outs, results

    def _work(
        self, flow: list[Tree], microbatch: jax.Array, turn: jax.Array, saved: dict[Row, Tree]
    ) -> tuple[list[Tree], list[Tree]]:
        each = [saved[e.row] if e.row is not None else self._of_turn(e, microbatch, turn) for e in self._each]
        places = {i: self._round(x, turn) for i, x in self._places.items()}
        fixed = [self.across.put(per_stage(x, microbatch, None)) if differs else x for x, differs in self._fixed]
        axes = [0 if differs else None for _, differs in self._fixed]

        def stage(flow: list[Tree], each: list[Tree], fixed: list[Tree], key: jax.Array, places: dict[int, jax.Array]) -> Any:
            def body(carry: list[Tree], given: Any) -> tuple[list[Tree], list[Tree]]:
                own, at = given
                return iterate(self._loop, self.results, key, carry, each=own, fixed=fixed, places=at)

            return jax.lax.scan(body, flow, (each, places), reverse=self._loop.is_backward)

        mapped = jax.vmap(stage, in_axes=(0, 0, axes, 0, 0), spmd_axis_name=self.order.stages.axis)
        with jax.named_scope("backward" if self._loop.is_backward else "forward"):
            outs, results = mapped(flow, each, fixed, self._keys[microbatch], places)
        return self.across.put(outs), self.across.put(results)

    def _of_turn(self, each: Each, microbatch: jax.Array, turn: jax.Array) -> Tree:
        own = each.array if each.kind == "same" else per_stage(each.array, microbatch, 1)
        return self._round(own, turn)

    def _round(self, tree: Tree, turn: jax.Array) -> Tree:
        """`(stages, iterations, ...)` of `(stages, rounds, iterations, ...)`."""
        if self.order.stages.repeats == 1:
            return jax.tree.map(lambda x: x[:, 0], tree)
        return per_stage(tree, turn, 0)

    def add(self, sums: list[Tree], results: list[Tree], tick: jax.Array) -> list[Tree]:
        """Add what all stages have made in a tick to sums, `(stages, rounds, iterations, ...)`."""
        _, turn, is_one = self._work_at(tick)
        none = jax.tree.map(jnp.zeros_like, results)
        taken = self.across.where(is_one, results, none)
        if self.order.stages.repeats == 1:
            return jax.tree.map(lambda total, x: total + x[:, None], sums, taken)
        add = jax.vmap(lambda total, x, at: total.at[at].add(x))
        return jax.tree.map(lambda total, x: add(total, x, turn), sums, taken)


def take(tree: Tree, index: jax.Array) -> Tree:
    """One of `(num, ...)`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def per_stage(tree: Tree, index: jax.Array, dim: int | None) -> Tree:
    """For each stage one of its own values, by its number.

    Args:
        tree: Of arrays.
        index: `(stages,)`.
        dim: Which dim of the arrays has the stages, if one has; the first of the others is what is taken from.
    """
    return jax.tree.map(lambda x: jax.vmap(take, in_axes=(dim, 0))(x, index), tree)


def _stack(values: Sequence[Result]) -> Tree:
    """Values as one array: without a copy, where they are rows of a stack at equal distances."""
    rows = [value for value in values if isinstance(value, StackRow) and value.stack is values[0].stack]
    if len(rows) == len(values) > 1:
        starts = [row.index for row in rows]
        apart = starts[1] - starts[0]
        size = len(jax.tree.leaves(rows[0].stack)[0])
        if starts == list(range(starts[0], size, apart)) and size == apart * len(rows):
            at = starts[0]
            return jax.tree.map(lambda x: x.reshape(len(rows), apart, *x.shape[1:])[:, at], rows[0].stack)
    return stack_of(values)
