"""Values that Python asks for, computed on the host: the part of a trace that leads to them is run before each call.

A program is made for what came out at its capture. Numbers and lengths must come out the same, or another program is
needed. Tensors of indices, of which only the lengths count, are inputs of the program.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.constants import bits_of, in_eager_torch, is_opaque, traced_storages, writes
from torch_shard._common.fx import fill_in, is_random
from torch_shard._common.types import PyTree

aten = torch.ops.aten

LARGEST = 1 << 20
"""Elements of a buffer, or of a tensor that a callable closes over, whose value Python may ask for."""

_OF_SHAPES = frozenset(
    {
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
        *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
    }
)
"""Operators to which the values of the tensor that they are given do not matter."""

_SHOWN = 60  # characters of a value in a message

Source = int | str | torch.Tensor
"""A leaf of the batch, a buffer, or a tensor that a callable closes over."""


@dataclasses.dataclass
class HostInputs:
    """What the host has before a call.

    Attributes:
        batch: Gives an array leaf of the batch, by number.
        buffer: Gives a buffer of the state, by name.
        paths: Gives the paths of the leaves of the batch, for messages.
        missing: Why there is no batch, if so.
        sizes: Whether sizes that depend on the batch are asked for; otherwise tensors are selected by a mask.
        missed: Set by a capture that could have asked for a size.
        goes_on: Whether another call follows with the buffers that this one leaves, before these can be read.
    """

    batch: Callable[[int], torch.Tensor]
    buffer: Callable[[str], torch.Tensor]
    paths: Callable[[], Sequence[str]]
    missing: str | None = None
    sizes: bool = False
    missed: bool = False
    goes_on: bool = False

    def read(self, source: Source) -> torch.Tensor:
        """The value of a source now."""
        if isinstance(source, torch.Tensor):
            return source
        if isinstance(source, int) and self.missing:
            raise NotImplementedError(f"Python needs a value of the batch, {self.missing}")
        return self.batch(source) if isinstance(source, int) else self.buffer(source)

    def name(self, source: Source) -> str:
        """The name of a source, for messages."""
        if isinstance(source, torch.Tensor):
            return f"a tensor of shape {tuple(source.shape)} that the loss reads"
        return self.paths()[source] if isinstance(source, int) else f"the buffer {source}"


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A value that Python has asked for.

    Attributes:
        place: The user's line.
        call: What gives it, of nodes of the trace: a function, positional and keyword arguments.
        after: The last node of the trace when it was asked.
        answer: What came out.
        given: The tensors in the answer, if these are inputs of the program; else None.
    """

    place: str
    call: tuple[Callable[..., Any], PyTree, PyTree]
    after: Node
    answer: PyTree = None
    given: tuple[torch.Tensor, ...] | None = None

    @property
    def nodes(self) -> list[Node]:
        """What it is asked of."""
        return [leaf for leaf in torch_pytree.tree_leaves(self.call[1:]) if isinstance(leaf, Node)]

    def key(self, answer: PyTree) -> Hashable:
        """The same for all answers that a program for one of them serves."""
        leaves = torch_pytree.tree_leaves(answer)
        if self.given is not None:
            return tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        with in_eager_torch():
            return tuple(bits_of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)

    @functools.cached_property
    def own_key(self) -> Hashable:
        """That of the answer at the capture."""
        return self.key(self.answer)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Another answer than the one that a program is for.

    Attributes:
        place: The user's line.
        asked: What Python asked for there.
        before: The answer that the program is for.
        now: The one that came out.
        microbatch: The number of the microbatch for which it came out.
    """

    place: str
    asked: str
    before: str
    now: str
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.place}\nHere Python asks for {self.asked}: it was {self.before} and is {self.now}"


class HostPart:
    """The part of a trace that answers questions."""

    def __init__(
        self,
        graph: Graph,
        questions: Sequence[Question],
        source_of: Callable[[Node], Source | None],
        literal_of: Callable[[Node], torch.Tensor | None],
    ) -> None:
        self._graph = Graph()  # a copy, as the trace is rewritten
        self._steps: list[Node | Question] = []
        self._questions: list[Question] = []
        self._literals: dict[Node, torch.Tensor] = {}
        self._results: dict[Node, tuple[int, int]] = {}
        self.sources: dict[Node, Source] = {}
        self.later: dict[str, torch.Tensor] = {}
        """Values of buffers that its answers depend on after the call, where these are known on the host."""
        self.is_known = True
        """Whether all that it needs is there on the host."""
        copies: dict[Node, Node] = {}
        results = {id(t): (n, at) for n, q in enumerate(questions) for at, t in enumerate(q.given or ())}
        for step in _leading_to(graph, questions):
            if isinstance(step, Question):
                call = torch_pytree.tree_map_only(Node, copies.__getitem__, step.call)
                self._questions.append(dataclasses.replace(step, call=call, after=self._graph._root))
                self._steps.append(self._questions[-1])
                continue
            if step.op == "call_function":
                copies[step] = node = self._graph.node_copy(step, lambda given: copies.get(given) or self._like(given))
                self.is_known = self.is_known and not is_random(step) and not is_opaque(step)
            else:
                copies[step] = node = self._graph.placeholder(step.name)
                self._note_input(node, literal_of(step), source_of(step), results)
            node.meta.clear()
            self._steps.append(node)
        self._writes = any(map(writes, self._graph.nodes))
        self._last: tuple[list[tuple[torch.Tensor, int]], list[torch.Tensor]] | None = None

    def _like(self, node: Node) -> Node:
        """A tensor of the shape of one whose value does not matter."""
        copied, fake = self._graph.placeholder(f"like_{node.name}"), node.meta["val"]
        if all(isinstance(size, int) for size in fake.shape):
            with in_eager_torch():
                self._literals[copied] = torch.zeros((), dtype=fake.dtype).expand(fake.shape)
        else:
            self.is_known = False
        return copied

    def _note_input(
        self, node: Node, literal: torch.Tensor | None, source: Source | None, results: dict[int, tuple[int, int]]
    ) -> None:
        if literal is not None:
            self._literals[node] = literal
        elif source is None:
            self.is_known = False
        elif id(source) in results:
            self._results[node] = results[id(source)]
        else:
            self.sources[node] = source

    @property
    def buffers(self) -> list[str]:
        """The names of the buffers that it reads."""
        return [source for source in self.sources.values() if isinstance(source, str)]

    @property
    def reads_batch(self) -> bool:
        """Whether it reads the batch."""
        return any(isinstance(source, int) for source in self.sources.values())

    @property
    def given(self) -> list[torch.Tensor]:
        """The results that are inputs of the program, as they were at the capture."""
        return [tensor for question in self._questions for tensor in question.given or ()]

    def meaning(self) -> list[object]:
        """What it computes of what, for comparison with another one."""
        found: list[object] = [(node.name, bits_of(literal)) for node, literal in self._literals.items()]
        for step in self._steps:
            if isinstance(step, Question):
                found.append((step.call[0], repr(step.call[1:]), step.given is None))
            else:
                source = self.sources.get(step)
                source = id(source) if isinstance(source, torch.Tensor) else source
                found.append((step.name, step.target, repr((step.args, step.kwargs)), source, self._results.get(step)))
        return found

    def read(self, inputs: HostInputs) -> dict[Node, torch.Tensor]:
        """The values of its sources now."""
        with in_eager_torch():
            return {node: inputs.read(source) for node, source in self.sources.items()}

    def answer(self, inputs: HostInputs) -> PyTree:
        """The answer to its only question."""
        with in_eager_torch():
            return next(answer for _, answer in self._answers(self.read(inputs)))

    @property
    def first(self) -> Hashable:
        """The answer to the first question at the capture, as a key."""
        return self._questions[0].own_key

    def first_now(self, inputs: HostInputs) -> Hashable:
        """The same now: it depends on no other answer."""
        question, answer = next(self._answers(self.read(inputs)))
        return question.key(answer)

    def run(self, values: Mapping[Node, torch.Tensor], inputs: HostInputs) -> list[torch.Tensor] | Mismatch:
        """Ask again."""
        seen = [(tensor, tensor._version) for tensor in values.values()]
        if self._last is not None and all(
            a is b and v == w for (a, v), (b, w) in zip(seen, self._last[0], strict=True)
        ):
            return self._last[1]
        found: list[torch.Tensor] = []
        for question, answer in self._answers(values):
            if question.key(answer) != question.own_key:
                return self._mismatch(question, answer, inputs)
            found += [] if question.given is None else torch_pytree.tree_leaves(answer)
        is_state_alone = all(isinstance(source, str) for source in self.sources.values())
        self._last = (seen, found) if is_state_alone else None  # others are written by NumPy, too
        return found

    def _answers(self, values: Mapping[Node, torch.Tensor]) -> Iterator[tuple[Question, PyTree]]:
        env: dict[Any, Any] = {**values, **self._literals}
        if self._writes:
            env = {node: value.clone() for node, value in env.items()}
        for step in self._steps:
            if isinstance(step, Question):
                with in_eager_torch():
                    env[step] = _call(*step.call, env)
                yield step, env[step]
            elif step in self._results:
                number, at = self._results[step]
                env[step] = torch_pytree.tree_leaves(env[self._questions[number]])[at]
            elif step.op == "call_function":
                with in_eager_torch():
                    env[step] = _call(step.target, step.args, step.kwargs, env)

    def _mismatch(self, question: Question, now: PyTree, inputs: HostInputs) -> Mismatch:
        names = ", ".join(dict.fromkeys(map(inputs.name, self.sources.values())))
        if question.given is None:
            return Mismatch(question.place, f"a value of {names}", _shown(question.answer), _shown(now))
        return Mismatch(question.place, f"a size that depends on {names}", _sizes(question.answer), _sizes(now))


def _leading_to(graph: Graph, questions: Sequence[Question]) -> list[Node | Question]:
    """What questions are asked of, in order, with what it is made of and what writes to that; and the questions."""
    asked: dict[Node, list[Question]] = {}
    for question in questions:
        asked.setdefault(question.after, []).append(question)
    steps, wanted, storages = list[Node | Question](), set[Node](), set[int]()

    def want(nodes: Sequence[Node]) -> None:
        new = [node for node in nodes if node not in wanted]
        wanted.update(new)
        storages.update(storage for node in new for storage in traced_storages(node))

    for node in reversed(graph.nodes):
        for question in reversed(asked.get(node, ())):
            steps.append(question)
            want(question.nodes)
        written = writes(node) and any(not storages.isdisjoint(traced_storages(i)) for i in node.all_input_nodes)
        if node in wanted or written:
            steps.append(node)
            want([] if node.target in _OF_SHAPES else node.all_input_nodes)
    return steps[::-1]


def _call(function: Any, args: PyTree, kwargs: PyTree, env: Mapping[Any, Any]) -> Any:
    return function(*fill_in(args, env.__getitem__), **fill_in(kwargs, env.__getitem__))


def _shown(answer: PyTree) -> str:
    text = ", ".join(str(v.tolist() if isinstance(v, torch.Tensor) else v) for v in torch_pytree.tree_leaves(answer))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _sizes(answer: PyTree) -> str:
    shapes = [tuple(tensor.shape) for tensor in torch_pytree.tree_leaves(answer)]
    return " and ".join(dict.fromkeys(str(shape[0] if len(shape) == 1 else shape) for shape in shapes))
