"""A captured loss as the parts of a pipeline: its stages, layers in a loop there and back, and what runs around these.

One microbatch goes through `once` (which is the same for all), `before`, the stages of `forward`, `middle` (head, loss,
and their backward pass), the stages of `backward`, and `after` (the gradients of embeddings). What only adds up
gradients comes last, and once for all microbatches: a sum of sums.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from torch_shard._common.caller import caller
from torch_shard._common.specs import axes_of, describe_mesh
from torch_shard._scan.execute import operands_of, places_of, reads_of
from torch_shard._scan.instructions import Instruction, Operand, Output
from torch_shard._scan.reroll import Loop
from torch_shard._scan.siblings import Siblings
from torch_shard._sharding import ResolvedPlan, Stages

Item = Instruction | Loop

Row = tuple[int, tuple[int, ...]]
"""What each iteration of a loop gives: the number of the instruction, and the path into its value."""


class NoPipeline(Exception):
    """Says why a loss is no pipeline."""


@dataclasses.dataclass
class Parts:
    """The parts of a pipeline.

    Attributes:
        once: Instructions that are alike for all microbatches.
        before: Those that run for each before the stages.
        forward: The layers.
        middle: What runs for each between the two passes.
        backward: The layers' backward pass; None without gradients.
        after: What runs for each at the end.
        tail: Sums of gradients.
        given: Outputs of each microbatch: the loss, metrics.
        summed: Outputs that are added up over microbatches: gradients.
    """

    once: list[Item]
    before: list[Item]
    forward: Loop
    middle: list[Item]
    backward: Loop | None
    after: list[Item]
    tail: list[Item]
    given: Sequence[Output]
    summed: Sequence[Output]

    def __post_init__(self) -> None:
        names = ("once", "before", "forward", "middle", "backward", "after", "tail")
        self._maker = {instruction: name for name in names for instruction in made_by(self._items(name))}
        loops = filter(None, (self.forward, self.backward))
        layers = [(layer, span) for loop in loops for layer, span in enumerate(in_order(loop))]
        self._layer = {each: (number, layer) for layer, span in layers for number, each in enumerate(span)}
        sums = operands_of(self.summed)
        read = dict.fromkeys(itertools.chain(*map(reads_of, self.tail)))
        self.sums = [v for v in dict.fromkeys([*sums, *read]) if self.maker(v) != "tail"]
        """What is added up over microbatches, of which the tail makes the outputs."""
        each = self.backward.each if self.backward else ()
        self.saved = self.rows_of(v for values in each for v in values if self.maker(v) == "forward")
        """What the backward pass reads of the forward pass of its own layer."""
        outputs = [*operands_of(self.given), *self.sums]
        read = [*self.reads("middle", "after", "tail"), *outputs, *self._read_there]
        of_layers = [v for v in dict.fromkeys(read) if self.maker(v) == "forward"]
        self.finals = _lasts(of_layers, self.forward)
        """What leaves the last layer and others read, with its number among what layers hand on."""
        self.seen = [v for v in of_layers if v not in self.finals]
        """What others read of a layer but what it hands on at the end."""
        self.made = list(dict.fromkeys([*self.saved, *self.rows_of(self.seen)]))
        """The results of layers that are read, but what they hand on."""
        makers = ("middle", "forward")
        self.handed = [v for v in self._read_there if self.maker(v) in makers]
        """What the backward pass of the layers reads beside what they have saved."""
        self.kept = [
            v for v in dict.fromkeys([*self.reads("after"), *operands_of(self.given)]) if self.maker(v) in makers
        ]
        """What comes after it reads, and outputs."""
        self.middle_sums = [v for v in self.sums if self.maker(v) in makers]
        of_layers = [v for v in [*self.reads("after"), *self.sums] if self.maker(v) == "backward"]
        self.ends = _lasts(of_layers, self.backward) if self.backward else {}
        """What leaves the first layer on the way back, likewise."""
        self.totals = self.rows_of(v for v in of_layers if v not in self.ends)
        """What layers give there beside it, which is added up."""
        self._refuse_unknown()

    @property
    def _read_there(self) -> list[Operand]:
        """What the backward pass reads beside what its own layer has saved."""
        loop = self.backward
        if loop is None:
            return []
        each = [values for values in loop.each if any(self.maker(v) != "forward" for v in values)]
        return list(dict.fromkeys([*(first for first, _, _ in loop.carries), *loop.fixed, *itertools.chain(*each)]))

    def maker(self, value: Operand) -> str:
        """The part that makes a value; `input` for what is given."""
        return "input" if isinstance(value.source, int) else self._maker[value.source]

    def _items(self, name: str) -> list[Item]:
        part = getattr(self, name)
        return part if isinstance(part, list) else [part] if part else []

    def reads(self, *names: str) -> list[Operand]:
        """All that these parts read."""
        items = itertools.chain(*map(self._items, names))
        return list(dict.fromkeys(itertools.chain(*map(reads_of, items))))

    def needed(self, maker: str, readers: Iterable[str], outputs: Iterable[Operand]) -> list[Operand]:
        """What a part makes and others read, or that is an output."""
        return [v for v in dict.fromkeys([*self.reads(*readers), *outputs]) if self.maker(v) == maker]

    def row_of(self, value: Operand) -> tuple[Row, int]:
        """Of what a layer makes: which of its results it is, and the number of the layer in order."""
        number, layer = self._layer[value.source]  # pyright: ignore[reportArgumentType]
        return (number, value.path), layer

    def rows_of(self, values: Iterable[Operand]) -> list[Row]:
        """Which results of layers these are."""
        return list(dict.fromkeys(row for row, _ in map(self.row_of, values)))

    def _refuse_unknown(self) -> None:
        for value in operands_of(self.given):
            if self.maker(value) in ("backward", "after", "tail"):
                raise NoPipeline("a metric is made of gradients")
        if self.backward is None:
            return
        for values in self.backward.each:
            rows = [self.row_of(v) for v in values[::-1] if self.maker(v) == "forward"]
            if rows and [(rows[0][0], at) for at in range(len(values))] != rows:
                raise NoPipeline("the backward pass of a layer reads what another layer has made")
        for value in self.reads("after"):
            if self.maker(value) == "backward" and value not in self.ends:
                raise NoPipeline("something else than a sum is made of the gradient of one of its parameters")


def parts_of(
    items: Sequence[Item],
    given: Sequence[Output],
    summed: Sequence[Output],
    *,
    stages: Stages,
    varying: Iterable[int],
) -> Parts:
    """Take a loss apart, some of whose inputs vary by microbatch."""
    forward, backward = _loops(items, stages, has_gradients=bool(summed))
    tail = _sums_at_the_end(items, given, summed)
    others = [item for item in items if item not in tail]
    at = others.index(forward)
    rest = others[at + 1 :]
    middle, after = (rest, []) if backward is None else (rest[: (b := rest.index(backward))], rest[b + 1 :])
    early, after = _parted(after, made_by([backward] if backward else []))
    once, before = _parted(others[:at], varying, _draws)
    return Parts(once, before, forward, [*middle, *early], backward, after, tail, given, summed)


def made_by(items: Iterable[Item]) -> Iterator[Instruction]:
    """All instructions, those of loops too."""
    for item in items:
        yield from itertools.chain(*item.iterations) if isinstance(item, Loop) else [item]


def in_order(loop: Loop) -> list[list[Instruction]]:
    """Its iterations in the order of the layers."""
    return loop.iterations[::-1] if loop.is_backward else loop.iterations


def _lasts(values: Iterable[Operand], loop: Loop) -> dict[Operand, int]:
    """Those of some values that a loop hands on at its end, and which of these they are."""
    last = loop.iterations[-1]
    handed = {Operand(last[number], path): at for at, (_, number, path) in enumerate(loop.carries)}
    return {value: handed[value] for value in values if value in handed}


def _loops(items: Sequence[Item], stages: Stages, *, has_gradients: bool) -> tuple[Loop, Loop | None]:
    """The loops over the layers, there and back."""
    loops = [item for item in items if isinstance(item, Loop)]
    # Others may be between them, such as norms.
    own = [(loop, tuple(path for path in loop.layers if path in stages.layers)) for loop in loops]
    forward = next((loop for loop, layers in own if layers == stages.layers), None)
    backward = next((loop for loop, layers in own if layers == stages.layers[::-1] and loop.is_backward), None)
    if forward is None or (backward is None and has_gradients):
        passes = "forward" if forward is None else "backward"
        raise NoPipeline(f"their {passes} passes are not one loop, in their order")
    for loop in filter(None, (forward, backward)):
        num, parts = len(loop.iterations), stages.num * stages.repeats
        if num % parts:
            per = len(stages.layers) // num
            raise NoPipeline(f"{per} layers are one iteration, and {num} iterations are not a multiple of {parts}")
    return forward, backward


def _sums_at_the_end(items: Sequence[Item], given: Iterable[Output], summed: Iterable[Output]) -> list[Item]:
    """Sums of two gradients that nothing else reads."""
    readers: dict[object, list[Item]] = {}
    for item in items:
        for value in reads_of(item):
            readers.setdefault(value.source, []).append(item)
    outputs, others = ({v.source for v in operands_of(part)} for part in (summed, given))
    tail: list[Item] = []
    for item in reversed(items):
        if not isinstance(item, Instruction) or not item.is_sum or item in others:
            continue
        if all(reader in tail for reader in readers.get(item, ())) and (item in outputs or item in readers):
            tail.insert(0, item)
    return tail


def _parted(
    items: Sequence[Item], sources: Iterable[int | Instruction], begins: Callable[[Item], bool] = lambda item: False
) -> tuple[list[Item], list[Item]]:
    """What needs nothing of these sources, nor of what begins anew, and the others."""
    late, early, rest = set(sources), list[Item](), list[Item]()
    for item in items:
        if begins(item) or any(value.source in late for value in reads_of(item)):
            late.update(made_by([item]))
            rest.append(item)
        else:
            early.append(item)
    return early, rest


def _draws(item: Item) -> bool:
    return bool(places_of(item)) if isinstance(item, Loop) else item.place is not None


def find_stages(
    model: torch.nn.Module,
    groups: list[Siblings],
    plan: ResolvedPlan,
    *,
    moments: ResolvedPlan,
    data_axes: Collection[str],
) -> Stages | None:
    """The layers that a plan with a pipeline splits over stages: the largest group of layers that are alike."""
    pipeline, mesh = plan.pipeline, plan.mesh
    if pipeline is None:
        return None
    groups = [group for group in groups if group.refused is None]
    if not groups:
        raise ValueError(
            f"{caller()}: a pipeline needs repeated layers, and {type(model).__name__} has no numbered siblings "
            "(nn.ModuleList, nn.Sequential) that are alike in classes, shapes and splits. Use a plan without pipeline."
        )
    chosen = max(groups, key=lambda group: _num_elements(model, group))
    layers, num = tuple(chosen.members.values()), mesh.shape[pipeline.axis]
    parts = num * pipeline.repeats
    if len(layers) % parts:
        times = f" * repeats={pipeline.repeats}" if pipeline.repeats > 1 else ""
        raise ValueError(
            f"{caller()}: the {len(layers)} layers of {chosen.path} are not a multiple of {parts} = "
            f"{pipeline.axis}={num}{times}, on mesh {describe_mesh(mesh)}. Choose a number of stages that divides them."
        )
    if fault := next(_faults(pipeline.axis, layers, plan, moments, data_axes=data_axes), None):
        raise ValueError(
            f"{caller()}: {fault} over {pipeline.axis!r}, which is the axis of the pipeline: a layer and its rows are "
            f"whole on one stage. Use other axes of mesh {describe_mesh(mesh)}."
        )
    return Stages(pipeline, num, layers)


def _faults(
    axis: str, layers: tuple[str, ...], plan: ResolvedPlan, moments: ResolvedPlan, *, data_axes: Collection[str]
) -> Iterator[str]:
    """What else is split over the axis of the stages."""
    own = tuple(f"{path}." for path in layers)
    for what, resolved in (("", plan), ("optimizer_plan: ", moments)):
        yield from (
            f"{what}{name} is split"
            for name, sharding in resolved.items()
            if name.startswith(own) and axis in axes_of(sharding.spec)
        )
    for asked in plan.activations:
        if axis in axes_of(asked.spec):
            yield f"activations: {asked.place} is split"
    if axis in data_axes:
        yield "batch_spec splits the batch"


def _num_elements(model: torch.nn.Module, group: Siblings) -> int:
    return sum(p.numel() for path in group.members.values() for p in model.get_submodule(path).parameters())
