"""A captured torch callable with its lowering, and the settings of the world around it that it was captured for."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn

import jax
import torch
from torch.fx import GraphModule, Node

from torch_shard._capture import (
    Aux,
    Captured,
    Change,
    Guard,
    Spec,
    StaleTensor,
    TensorFn,
    bits_of,
    canonical_form,
    capture,
    depends_on_inputs,
    is_capturing,
    leave_users_frames,
    made_buffers,
    module_roots,
    new_values,
    node_form,
    nodes_of_closure,
    replaces_tensors,
)
from torch_shard._common.axes import manual_axes, still_hold, tracked_axes
from torch_shard._common.dtypes import has_x64
from torch_shard._common.fx import COPIES, DIM_VIEWS, operator_name, shape_of
from torch_shard._common.overrides import KERNELS
from torch_shard._lowering.interpreter import Lowered, draws_random, lower, missing_lowerings, place_of
from torch_shard._lowering.number_inputs import Kind, Place, carry, outline_of
from torch_shard._lowering.ops import keeps_whole

# Closed-over tensors of 64-bit floating point, of which JAX keeps 32 bits: where that loses digits.


logger = logging.getLogger(__name__)


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
            self.graph: Captured[Aux] = capture(fn, specs, keep=keeps_whole, inner=inner)
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
        roots = Guard(module_roots(modules, torch.nn.Module()))
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

    def _check_next_call(self, fn: TensorFn[Aux], specs: Sequence[Spec], what: str) -> None:
        """Refuse a callable whose next call is another program, for what this one has left on modules."""
        changed = self.graph.changed
        if not changed:
            return
        first = canonical_form(self.graph, self._inner())
        with new_values(changed), _explaining(changed, what):
            made_buffers(changed)
            second = capture(fn, specs, keep=keeps_whole)
        if not self._means_the_same(first, second) or self._differs_later(fn, specs, second):
            is_proved = not list(self._inner()) and self.graph.host is None
            if not is_proved and all(map(_is_of_constants, changed)):  # a table that is made once: found from now on
                self.graph = dataclasses.replace(second, changed=changed)
                return
            names = ", ".join(change.what for change in changed)
            raise NotImplementedError(
                f"{what} changes {names} on each call and depends on it, but a compiled program is "
                "the same for every call. Make it a buffer (register_buffer, a tensor), which the program can carry."
            )
        for change in changed:
            if depends_on_inputs(change):
                logger.warning(
                    "forward writes %s; a compiled step does not keep such writes. Return the value in the metrics, or "
                    "register a buffer.",
                    change.what,
                )

    def _differs_later(self, fn: TensorFn[Aux], specs: Sequence[Spec], second: Captured[Aux]) -> bool:
        """Tell whether a count that the callable keeps makes it another program after many calls."""
        then = {change.path: change.new for change in second.changed}
        later = [change.after(_MANY_CALLS, then.get(change.path)) for change in self.graph.changed]
        if later == self.graph.changed:
            return False
        try:
            with new_values(later):
                first = canonical_form(self.graph, self._inner())
                return not self._means_the_same(first, capture(fn, specs, keep=keeps_whole))
        except Exception:  # a table has no such entry, so that it depends on the count
            return True

    def _means_the_same(self, first: Hashable, second: Captured[Aux]) -> bool:
        layers = list(self._inner())
        if canonical_form(second, layers) == first:
            return True
        return not layers and canonical_form(second, folded=True) == canonical_form(self.graph, folded=True)


_MANY_CALLS = 1_008_000  # beyond what a warmup takes, and a multiple of usual intervals


def _is_of_constants(change: Change) -> bool:
    """Tell whether a callable has left, where no tensor was, tensors that depend on no input; or names of buffers."""
    if change.name == "_non_persistent_buffers_set":
        return True
    return bool(change.tensors) and not replaces_tensors(change) and not depends_on_inputs(change)


@contextlib.contextmanager
def _explaining(changes: Sequence[Change], what: str) -> Iterator[None]:
    """Say by which attribute a tensor of one call comes back in the next."""
    try:
        yield
    except StaleTensor as error:
        change = next((change for change in changes if any(t is error.tensor for t in change.tensors)), None)
        if change is None:
            raise
        name = change.name if isinstance(change.old, torch.Tensor) else change.path.rpartition(".")[2]
        raise NotImplementedError(
            f"{error.line}\n{what} reads {change.what}, a tensor, and writes it: it carries a "
            "value from call to call, which a compiled program does only in a buffer. Register it in __init__: "
            f"self.register_buffer({name!r}, tensor, persistent=False); forward stays as it is."
        ) from error


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
    """Of each node its place, and its form, in which short tensors that are closed over show their values."""
    nodes = list(captured.module.graph.nodes)
    names = {node: f"%{number}" for number, node in enumerate(nodes)}
    for node, tensor in nodes_of_closure(captured).items():
        is_short = tensor.numel() <= 4 and not tensor.is_meta
        names[node] = str(tensor.tolist()) if is_short else f"a tensor of {bits_of(tensor)}"

    for node in nodes:
        if node.op == "call_function":
            yield place_of(node), node_form(node, names.__getitem__)


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
