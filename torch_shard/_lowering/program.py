"""A captured torch callable with its lowering, and the settings of the world around it that it was captured for."""

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import jax
import torch
from torch.fx import GraphModule, Node

from torch_shard._capture import (
    Captured,
    Guard,
    Spec,
    TensorFn,
    bits_of,
    capture,
    is_capturing,
    leave_users_frames,
)
from torch_shard._common.axes import manual_axes, still_hold, tracked_axes
from torch_shard._common.dtypes import has_x64
from torch_shard._common.fx import COPIES, DIM_VIEWS, fill_in, operator_name, shape_of
from torch_shard._common.overrides import KERNELS
from torch_shard._lowering.carried import Kind, Place, carry, outline_of
from torch_shard._lowering.interpreter import Lowered, draws_random, lower, missing_lowerings, place_of
from torch_shard._lowering.ops import keeps_whole

# Closed-over tensors of 64-bit floating point, of which JAX keeps 32 bits: where that loses digits.


logger = logging.getLogger(__name__)

Aux = TypeVar("Aux")


class Program(Generic[Aux]):
    """A captured callable with its lowering.

    Args:
        fn: The callable.
        specs: Its inputs.
        what: Its name, for errors.
        others: Operators that the caller runs in a way of its own.
        inner: Gives the graphs that these stand for.
        looks: Whether `look_again` does.
    """

    def __init__(
        self,
        fn: TensorFn[Aux],
        specs: Sequence[Spec],
        what: str,
        *,
        others: Collection[object] = (),
        inner: Callable[[], Iterable[torch.fx.GraphModule]] = tuple,
        looks: bool = False,
    ) -> None:
        self._inner = inner
        self._again = (fn, specs, what) if looks else None
        self._looks = Looks()
        try:
            self.graph: Captured[Aux] = capture(fn, specs, keep=keeps_whole, code=self._code)
        except Exception as error:
            config: Any = jax.config
            if config.jax_traceback_filtering != "off" and not is_capturing():
                leave_users_frames(error)
            raise
        self._check_next_call(fn, specs, what)
        if any(node.target not in others for node in missing_lowerings(self.graph.module.graph.nodes)):
            raise _missing_error(fn, specs, what)
        explained = functools.partial(capture, fn, specs, keep=keeps_whole, explain=True)
        warn_of_rounding(self.graph, inner, what, explained)
        self.random = draws_random(self.graph.module)

    @functools.cached_property
    def run(self) -> Lowered:
        """The JAX function `(key, *arrays) -> list of arrays`."""
        return lower(self.graph.module)

    def carrying(self, kinds: Mapping[Kind, list[Place]]) -> "Program[Aux]":
        """The same program with numbers of its graph as its last inputs; see `carry`."""
        other = copy.copy(self)
        other.graph = dataclasses.replace(self.graph, module=carry(self.graph.module, kinds))
        vars(other).pop("run", None)
        return other

    def reading(self, guard: Guard) -> "Program[Aux]":
        """The same program, current for as long as a guard holds, and while modules that ran are as they were."""
        modules = ((type(module).__name__, module) for ref, _ in self.graph.modules if (module := ref()) is not None)
        roots = Guard.of_modules(modules)
        self.graph = dataclasses.replace(self.graph, guards=(guard, roots))
        return self

    def look_again(self) -> None:
        """Capture the callable once more where that is due, before it is used again."""
        if self._again is None or not self._looks.is_due():
            return
        fn, specs, what = self._again
        with torch.inference_mode(False):  # as at first
            second = capture(fn, specs, keep=keeps_whole)
        if not outline_of(self.graph, {}).is_same(outline_of(second, {})):
            refuse_change(fn, specs, what)
        for guard in self.graph.guards:  # a count of calls has gone on, and was seen to be harmless
            guard.renew()

    def is_current(self) -> bool:
        """Tell whether modules still have the training flags, and named axes the sizes, of the capture."""
        return self.graph.is_current() and self.fits_axes()

    def fits_axes(self) -> bool:
        """Tell whether named axes have the sizes that they had at the capture."""
        return still_hold(self.graph.axes)

    def _code(self, graph: Captured[Aux]) -> list[str]:
        return [graph.module.code, *(module.code for module in self._inner())]

    def _check_next_call(self, fn: TensorFn[Aux], specs: Sequence[Spec], what: str) -> None:
        """Refuse a callable whose next call is another program, for what this one has left on modules."""
        changed = self.graph.changed
        if not changed:
            return
        first = self._code(self.graph)
        with changed.in_place(), changed.explained(what):
            changed.made_buffers()
            second = capture(fn, specs, keep=keeps_whole)
        if not self._means_the_same(first, second) or self._differs_later(fn, specs, second):
            is_proved = len(first) == 1 and self.graph.host is None
            if not is_proved and changed.are_of_constants():  # a table that is made once: found from now on
                self.graph = dataclasses.replace(second, changed=changed)
                return
            names = ", ".join(change.what for change in changed)
            raise NotImplementedError(
                f"{what} changes {names} on each call and depends on it, but a compiled program is "
                "the same for every call. Make it a buffer (register_buffer, a tensor), which the program can carry."
            )
        for change in changed.that_depend_on_inputs():
            logger.warning(
                "forward writes %s; a compiled step does not keep such writes. Return the value in the metrics, or "
                "register a buffer.",
                change.what,
            )

    def _differs_later(self, fn: TensorFn[Aux], specs: Sequence[Spec], second: Captured[Aux]) -> bool:
        """Tell whether a count that the callable keeps makes it another program after many calls."""
        later = self.graph.changed.after(_MANY_CALLS, second.changed)
        if later == self.graph.changed:
            return False
        try:
            with later.in_place():
                return not self._means_the_same(self._code(self.graph), capture(fn, specs, keep=keeps_whole))
        except Exception:  # a table has no such entry, so that it depends on the count
            return True

    def _means_the_same(self, first: list[str], second: Captured[Aux]) -> bool:
        if self._code(second) == first and self.graph.has_same_closure(second):
            return True
        return len(first) == 1 and second.meaning() == self.graph.meaning()


_MANY_CALLS = 1_008_000  # beyond what a warmup takes, and a multiple of usual intervals


def _missing_error(fn: TensorFn[Aux], specs: Sequence[Spec], what: str) -> NotImplementedError:
    """Captured once more, with source lines."""
    graph = capture(fn, specs, keep=keeps_whole, explain=True)
    nodes = missing_lowerings(graph.module.graph.nodes)
    lines = [f"  {node.target}: {place_of(node)}" for node in nodes]
    return NotImplementedError(
        f"{what} uses {len(nodes)} operator{'s' * (len(nodes) > 1)} without a lowering to JAX:\n\n"
        + "\n".join(lines)
        + "\n\nWrite these with other torch operators, or compute them in JAX with torch_shard.call_jax. "
        "An operator of your own (torch.library) takes a lowering: torch_shard.lowering."
    )


def capture_settings() -> tuple[object, ...]:
    """The settings that change what a callable means, and the mesh axes that it is written for one device of."""
    autocast = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "jax", "cuda"))
    axes = tuple(manual_axes().items())
    hooks = tuple(_global_hooks())
    return torch.get_default_dtype(), autocast, has_x64(), axes, bool(axes and tracked_axes()), hooks, *KERNELS


def _global_hooks() -> Iterator[int]:
    """The numbers of the user's hooks on all modules: torch gives each hook a new one. A capture has its own hooks."""
    for name in ("forward_pre", "forward", "backward_pre", "backward"):
        hooks: dict[int, object] = getattr(torch.nn.modules.module, f"_global_{name}_hooks")
        yield from (n for n, hook in hooks.items() if not getattr(hook, "__module__", "").startswith("torch_shard."))


# A second look at a callable: captured once more, it must be the same program, or a compiled one would be wrong.
#
# It may count its calls, draw from a generator, take the next of an iterator or read a clock, wherever it keeps these.
# Nothing in a compiled program says so; but a callable that is run again is then another one.


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


WIDE = (torch.float64, torch.complex128)

_MOVES = (
    COPIES | DIM_VIEWS | {"view", "_unsafe_view", "reshape"} | {"index", "index_select", "gather", "embedding", "flip"}
)
"""Operators whose results are values that they were given: rounding before them is rounding after them."""

_LAYER = "layer"


def warn_of_rounding(
    graph: Captured[Any], inner: Callable[[], Iterable[GraphModule]], what: str, explained: Callable[[], Captured[Any]]
) -> None:
    """Warn of closed-over tensors that lose digits; what is converted to 32 bits before any arithmetic does not."""
    if has_x64() or not _arithmetic(graph, inner()):
        return
    nodes = _arithmetic(explained(), inner())
    lines = "".join(dict.fromkeys(f"\n  {source.meta['val'].dtype} {shape_of(source)}: {at}" for source, at in nodes))
    logger.warning(
        "%s computes with closed-over tensors of 64-bit floating point, of which JAX keeps 32 bits: values are rounded "
        "before they are used. Differences of large numbers lose digits. Write tensor.float() where it is used, or "
        "jax.config.update('jax_enable_x64', True) at the start.%s",
        what,
        lines,
    )


def _arithmetic(graph: Captured[Any], inner: Iterable[GraphModule]) -> list[tuple[Node, str]]:
    """The wide tensors that are closed over and computed with, and the place of that."""
    inputs = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    closure = inputs[len(inputs) - len(graph.closure) :]
    inner_inputs = (node for module in inner for node in module.graph.nodes if node.op == "placeholder")
    sources = filter(_is_wide, [*closure, *inner_inputs])
    return [(source, place_of(user)) for source in sources for user in _computing(source)[:1]]


def _computing(source: Node) -> list[Node]:
    """The first nodes that do more with a wide tensor than to move its values and to round them."""
    found: list[Node] = []
    for user in source.users:
        name = operator_name(user)
        if name in _MOVES or (name == "_to_copy" and _is_wide(user)):
            found += _computing(user)
        elif user.op != "output" and name not in ("_to_copy", _LAYER):
            found.append(user)
    return found


def _is_wide(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in WIDE
