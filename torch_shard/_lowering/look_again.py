"""A second look at a callable: captured once more, it must be the same program, or a compiled one would be wrong.

It may count its calls, draw from a generator, take the next of an iterator or read a clock, wherever it keeps these.
Nothing in a compiled program says so; but a callable that is run again is then another one.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Node

from torch_shard._capture import Captured, Spec, TensorFn, bits_of, capture
from torch_shard._common.fx import fill_in
from torch_shard._lowering.interpreter import place_of
from torch_shard._lowering.ops import keeps_whole

_REMEDY = (
    "A compiled program is the same for every call, so what Python changes from call to call must come into it: pass "
    "it in the batch, make it a buffer of the model (register_buffer), or draw random numbers with torch.rand and its "
    "like. A step with look_again=False does not look."
)


class Looks:
    """At which uses of a program a second look is due: the first after its capture, the 10th, the 100th, ..."""

    def __init__(self) -> None:
        self._uses = 0

    def is_due(self) -> bool:
        """Count one use, and tell whether a look is due before it."""
        self._uses += 1
        return str(self._uses).strip("0") == "1"


def refuse_change(fn: TensorFn[Any], specs: Sequence[Spec], what: str, changed: str | None = None) -> NoReturn:
    """Refuse a callable of which two captures have differed."""
    named = "" if changed is None else f"{changed} has changed. "
    raise NotImplementedError(
        f"{_what_changes(fn, specs)}{what} is another function when it is called again. {named}{_REMEDY}"
    )


def _what_changes(fn: TensorFn[Any], specs: Sequence[Spec]) -> str:
    """The line in which two calls differ, with what each has there; empty where none is found."""
    try:
        first, second = [capture(fn, specs, keep=keeps_whole, explain=True) for _ in range(2)]  # with source lines
    except Exception:  # of the user's own code: an iterator has come to its end, say
        return ""
    for before, after in itertools.zip_longest(_lines(first), _lines(second)):
        if before is None or after is None or before[1] != after[1]:
            place = (before or after or ("",))[0]
            return f"{place}\nHere {_apart(*(line[1] if line else () for line in (before, after)))}. "
    return ""


def _apart(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """Say in what an operator differs from the one of the next call."""
    if before[:1] != after[:1] or len(before) != len(after):
        shown = (operator[0] if operator else "nothing" for operator in (before, after))
        return "one call runs {}, and the next {}".format(*shown)
    values = ((a, b) for a, b in zip(before, after, strict=True) if a != b)
    return f"{before[0]} is given " + ", ".join(f"{a}, and at the next call {b}" for a, b in values)


def _lines(captured: Captured[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Of each node its place, and what it computes of what: operator, numbers, and the values that it is given."""
    nodes = list(captured.module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    closed = dict(zip(inputs[len(inputs) - len(captured.closure) :], captured.closure, strict=True))
    order = {node: _Source(n, closed.get(node)) for n, node in enumerate(nodes)}
    for node in nodes:
        if node.op == "call_function":
            yield place_of(node), _told(node, order)


def _told(node: Node, order: dict[Node, "_Source"]) -> tuple[str, ...]:
    arguments: Any = fill_in((node.args, node.kwargs), order.__getitem__)
    return str(node.target), *(repr(value) for value in (*arguments[0], *arguments[1].values()))


class _Source:
    """A source of a node: its number, or its values where it is closed over."""

    def __init__(self, number: int, closed: torch.Tensor | None) -> None:
        self._number, self._closed = number, closed

    def __repr__(self) -> str:
        if self._closed is None:
            return f"%{self._number}"
        is_short = self._closed.numel() <= 4 and not self._closed.is_meta
        return str(self._closed.tolist()) if is_short else f"a tensor of {bits_of(self._closed)}"
