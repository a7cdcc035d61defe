"""A second look at a callable: captured once more, it must be the same program, or a compiled one would be wrong.

It may count its calls, draw from a generator, take the next of an iterator or read a clock, wherever it keeps these.
Nothing in a compiled program says so; but a callable that is run again is then another one.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch_shard._capture import Captured, Spec, TensorFn, bits_of, capture, node_form, nodes_of_closure
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
        # `explain` notes source lines, which costs time, so that the captures before had none.
        first = capture(fn, specs, keep=keeps_whole, explain=True)
        second = capture(fn, specs, keep=keeps_whole, explain=True)
    except Exception:
        # Of the user's own code: an iterator has come to its end, say.
        return ""

    for before, after in itertools.zip_longest(_nodes(first), _nodes(second), fillvalue=("", ())):
        form_before = before[1]
        form_after = after[1]
        if form_before != form_after:
            place = before[0] or after[0]
            return f"{place}\nHere {_difference(form_before, form_after)}. "
    return ""


def _difference(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """Say in what an operator differs from the one of the next call."""
    if before[:1] != after[:1] or len(before) != len(after):
        operator_before = before[0] if before else "nothing"
        operator_after = after[0] if after else "nothing"
        return f"one call runs {operator_before}, and the next {operator_after}"

    arguments: list[str] = []
    for argument_before, argument_after in zip(before, after, strict=True):
        if argument_before != argument_after:
            arguments.append(f"{argument_before}, and at the next call {argument_after}")
    return f"{before[0]} is given " + ", ".join(arguments)


def _nodes(captured: Captured[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Of each operator its place, and its form, in which short tensors that are closed over show their values."""
    nodes = list(captured.module.graph.nodes)
    names = {node: f"%{number}" for number, node in enumerate(nodes)}
    for node, tensor in nodes_of_closure(captured).items():
        is_short = tensor.numel() <= 4 and not tensor.is_meta
        names[node] = str(tensor.tolist()) if is_short else f"a tensor of {bits_of(tensor)}"

    for node in nodes:
        if node.op == "call_function":
            yield place_of(node), node_form(node, names.__getitem__)
