"""A torch callable and example shapes become one functional ATen graph, by PyTorch's own tracer and autograd.

Nothing is executed: the callable runs once on fake CPU tensors, so that PyTorch itself resolves views, mutation, ties,
autograd modes, hooks, custom functions and autocast. This module knows nothing of JAX. With `fakes`, it alone imports
PyTorch's semi-public tracing API.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture.autocast import autocast_only
from torch_shard._capture.canonical import canonical_form
from torch_shard._capture.changes import Changes
from torch_shard._capture.constants import (
    carry_random_places,
    constants_to_inputs,
    decomposes_draws,
    return_writes,
)
from torch_shard._capture.data_dependence import DataDependence
from torch_shard._capture.effect_plan import EffectPlan
from torch_shard._capture.effects import Effects
from torch_shard._capture.environment import capture_environment, reference_kernels
from torch_shard._capture.fakes import empty_like, fakes, node_in, remember, tracer
from torch_shard._capture.function_mode import CaptureMode, annotated, current_mode, is_capturing
from torch_shard._capture.generators import Generators
from torch_shard._capture.guards import Guard, ModuleFlags
from torch_shard._capture.host_values import HostPart
from torch_shard._capture.masks import rules_for_selections
from torch_shard._capture.provenance import INSTALLED, calls_seen, end_at_the_users_line, torchs_log_silent, user_frame
from torch_shard._capture.ragged import UnknownSizeError, WithMasks, is_ragged
from torch_shard._capture.side_effects import Change
from torch_shard._capture.simplify import simplify, stride_in_order
from torch_shard._capture.stand_ins import StandIn, StandIns, standing_in
from torch_shard._common.caller import caller
from torch_shard._common.fx import STRICT_VIEWS, check_outputs, outputs_of
from torch_shard._common.overrides import FUNCTIONS, OPERATORS
from torch_shard._common.patching import without_collection
from torch_shard._common.types import PyTree

aten = torch.ops.aten

Aux = TypeVar("Aux")
TensorFn = Callable[..., tuple[Sequence[torch.Tensor], Aux]]
"""A function of tensors alone, to be captured: it returns tensors and other values."""

_OF_MEANS = (
    *(aten.mse_loss_backward.default, aten.huber_loss_backward.default),
    *(aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default),
)
"""Gradients of losses that may be means, which PyTorch decomposes."""

Keep = Callable[[torch._ops.OperatorBase, bool], bool]


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and torch dtype of one input tensor, and whether the callable sees `requires_grad` on it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclasses.dataclass(frozen=True)
class Captured(Generic[Aux]):
    """A captured callable.

    Attributes:
        module: Functional ATen graph of `(*inputs, *closure) -> (*outputs, *new values of written inputs)`.
        closure: Tensors that the callable reached by itself; their current values are the last inputs.
        num_outputs: How many outputs the callable has.
        written: Positions of the inputs that the callable wrote in place; their new values follow the outputs.
        modules: Every module that ran, with the training flag that it had.
        aux: What the callable returned besides tensors.
        changed: Numbers, strings, tensors and hooks that the callable left on modules; they have been put back.
        skipped: Places of checks of values, which a compiled program does not make.
        graded: Closed-over tensors that the callable left a gradient for in `.grad`, which it has not reached.
        num_draws: How many random operators it ran, numbered in the graph; None if PyTorch decomposes some.
        axes: Named axes that collectives in the callable spoke of, with their sizes.
        host: What is to be computed on the host before each call, as Python has asked for values; else None.
        guards: Of values that the callable read from outside, where its caller has noted them.
        effects: What is to be done after each call with numbers that it gives.
    """

    module: torch.fx.GraphModule
    closure: tuple[torch.Tensor, ...]
    num_outputs: int
    written: tuple[int, ...]
    modules: ModuleFlags
    aux: Aux
    changed: Changes
    skipped: list[str]
    graded: list[torch.Tensor]
    num_draws: int | None
    axes: dict[str, int]
    host: HostPart | None
    guards: tuple[Guard, ...] = ()
    effects: EffectPlan = dataclasses.field(default_factory=EffectPlan)

    @property
    def num_nodes(self) -> int:
        """Number of nodes: a measure of what the capture cost."""
        return len(self.module.graph.nodes)

    def is_current(self) -> bool:
        """Tell whether every module that ran still has its training flag, and what was read its value."""
        return self.modules.hold() and all(guard.changed() is None for guard in self.guards)


def capture(
    fn: TensorFn[Aux],
    specs: Sequence[Spec],
    *,
    keep: Keep,
    explain: bool = False,
    restore: bool = True,
    inner: Callable[[], Iterable[GraphModule]] = tuple,
) -> Captured[Aux]:
    """Run `fn` once on fakes of `specs` and return the graph of ATen operators that it ran.

    Args:
        fn: Takes one tensor per spec, returns a flat sequence of tensors, and anything else that is not a tensor.
        specs: The inputs.
        keep: Tells, for an operator and whether PyTorch has a core rule to decompose it, if it stays whole.
        explain: Record source lines on the nodes (slower; for error messages).
        restore: Put back the attributes that `fn` changes on modules; otherwise a capture around this one does.
        inner: Gives the graphs that the graph which was just captured calls by number.

    Raises:
        NotImplementedError: Python depends on the value of a tensor in `fn`. The message has file and line.
    """
    around = current_mode()
    explain = explain or (around is not None and around.explains)
    generators = None if is_capturing() else Generators(fn)
    modes = list[CaptureMode]()
    run = functools.partial(_capture_on_fakes, fn, specs, keep=keep, explain=explain, restore=restore, modes=modes)
    try:
        graph, changes, effects = run()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, NotImplementedError) as error:
        if not _may_be_known(modes):
            _tell_what_is_known(modes)
            raise
        run = functools.partial(run, answers_at_once=True)
        try:
            graph, changes, effects = run()
        except Exception:
            _tell_what_is_known(modes)
            raise error from None
    if effects is not None and (effects.made or effects.counted or effects.counted_in_modules):
        graph, changes = _with_plan(graph, changes, effects, run, inner)
    again = functools.partial(run, explain=False)
    if generators is not None and (line := generators.line_that_draws(again)) is not None:
        raise NotImplementedError(
            f"{line}\nHere the captured function draws from Python's `random` or from NumPy. It runs once, so a "
            "compiled program would keep these numbers forever. Use torch.rand and its like, which draw anew at each "
            "call, or draw outside and pass the numbers in the batch."
        )
    left = Changes(changes)
    left.refuse_new_parameters()
    return dataclasses.replace(graph, changed=left.that_matter())


def _may_be_known(modes: list[CaptureMode]) -> bool:
    """Tell whether a capture that failed had numbers that are not known yet, and that the host may be able to tell."""
    effects: Effects | None = modes[-1].effects if modes else None
    return effects is not None and effects.may_be_known


def _tell_what_is_known(modes: list[CaptureMode]) -> None:
    """Print what a callable that failed has printed: it may say why."""
    if modes and modes[-1].effects is not None:
        modes[-1].effects.tell_what_is_known()


def _with_plan(
    graph: Captured[Aux],
    changes: list[Change],
    effects: Effects,
    run: Callable[..., tuple[Captured[Aux], list[Change], Effects | None]],
    inner: Callable[[], Iterable[GraphModule]],
) -> tuple[Captured[Aux], list[Change]]:
    """Capture again with stand-ins at the places that Python writes to, and give the plan of both captures."""
    plan, first = effects.made, canonical_form(graph, inner())
    assert plan is not None
    stand_ins, reads = StandIns(effects), list[str]()
    taken_back = [(count.place, count.place.get()) for count in effects.counted_in_modules]
    for count in (*effects.counted, *effects.counted_in_modules):
        count.place.set(count.before)
    failure: Exception | None = None
    made: list[StandIn] = []
    for made in stand_ins.choices():
        if not made:
            break
        try:
            with standing_in(made):
                second, later_changes, later = run(items_wanted=plan.positions)
        except Exception as error:  # of code to which a stand-in is not what was there
            failure = error
            continue
        if later is None or later.made is None:
            continue
        reads = stand_ins.reads(later.made, made)
        is_same = canonical_form(second, inner()) == first
        if is_same and (both := stand_ins.merged(later, made)) is not None:
            not_done = [count.place.name for count in effects.counted if not both.sets(count.place)]
            if not_done:
                raise _reads_what_it_writes(not_done, reads) from failure
            return dataclasses.replace(second, effects=both), later_changes

    for place, value in taken_back:
        place.set(value)
    if made or effects.counted:
        if isinstance(failure, NotImplementedError):
            raise failure
        names = [each.place.name for each in made] or [count.place.name for count in effects.counted]
        raise _reads_what_it_writes(names, reads) from failure
    unread = stand_ins.unread(plan, [])
    return dataclasses.replace(graph, effects=dataclasses.replace(plan, unread=unread)), changes


def _reads_what_it_writes(names: list[str], reads: list[str]) -> NotImplementedError:
    lines = "".join(f"{line}\n" for line in dict.fromkeys(reads))
    places = ", ".join(dict.fromkeys(names))
    return NotImplementedError(
        f"{lines}{caller()}: each call of the captured function changes {places}, as a count, a sum or a list, and "
        "what is there decides what it does, so that the program would be another one at each step. Change or read it "
        "after the step, pass it in the batch, or return the numbers in the metrics."
    )


def _capture_on_fakes(
    fn: TensorFn[Aux],
    specs: Sequence[Spec],
    *,
    keep: Keep,
    explain: bool,
    restore: bool,
    modes: list[CaptureMode],
    answers_at_once: bool = False,
    items_wanted: Sequence[int] = (),
) -> tuple[Captured[Aux], list[Change], Effects | None]:
    """Capture, and give what it has changed and been put back."""
    within = is_capturing()
    with calls_seen(False), without_collection(), fakes(explain) as (mode, capture_mode):
        changes: list[Change] = []
        capture_mode.items_wanted, capture_mode.answers_at_once = items_wanted, answers_at_once
        modes.append(capture_mode)
        has_ended = False
        try:
            with contextlib.nullcontext() if within else torchs_log_silent():
                graph = _capture(fn, specs, keep=keep, mode=mode, capture_mode=capture_mode)
            has_ended = True
        except Exception as error:
            if not within:
                end_at_the_users_line(error, capture_mode.path)
            raise
        finally:
            if restore:
                changes = capture_mode.side_effects.restore(is_whole=not has_ended)
        if capture_mode.effects is not None:
            capture_mode.effects.check_taken_back()
        return graph, changes, capture_mode.effects


def _capture(
    fn: TensorFn[Aux],
    specs: Sequence[Spec],
    *,
    keep: Keep,
    mode: FakeTensorMode,
    capture_mode: CaptureMode,
) -> Captured[Aux]:
    with mode:
        fakes = [torch.empty(s.shape, dtype=s.dtype, device="cpu", requires_grad=s.requires_grad) for s in specs]
    aux, hosts = list[Aux](), list[HostPart | None]()

    own: Any = mode
    values = DataDependence(
        lambda tensor: node_in(own.tracer, tensor), lambda: own.tracer.root, lambda: own.tracer.graph
    )

    def traced(*args: torch.Tensor) -> list[torch.Tensor]:
        own.tracer = tracer()  # for `_revive`, too
        with annotated(module=""), capture_mode.seeing(), capture_environment(), values:
            with calls_seen(True):
                outputs, other = fn(*args)
            outputs = values.where_assumed(outputs)
            for buffer in capture_mode.side_effects.new_buffers():  # of constants, and of buffers as they are now
                for value in values.values([buffer], batch=False) or ():
                    remember(buffer, value)
            hosts.append(values.host)
        aux.append(other)
        return outputs

    table: dict[Any, Any] = {**rules_for_selections(), **OPERATORS}
    table |= {op: functools.partial(_gradient_of_mean, table.get(op)) for op in _OF_MEANS}
    with _errors_for_users(), reference_kernels(), preserve_node_meta(), enable_python_dispatcher(), mode:
        with_views = make_fx(traced, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    if values.refused:
        raise NotImplementedError(values.refused)
    _refuse_swallowed(with_views.graph, values.asked)
    constants = constants_to_inputs(with_views)
    with mode:
        inputs = [*(f.detach() for f in fakes), *(empty_like(c) for c in constants)]
        for node, value in zip(with_views.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["val"] = value  # of constants, too
        stride_in_order(with_views)
        functional = _functionalize(with_views, inputs, keep)
    check_outputs(with_views.graph, functional.graph)
    num_outputs = len(outputs_of(with_views.graph))
    written = return_writes(functional, num_outputs, len(specs))
    carry_random_places(with_views.graph, functional.graph)
    for node in with_views.graph.nodes:
        node.meta.pop("val", None)  # the graph is a cycle: fakes would live until the next garbage collection
    simplify(functional)
    return Captured(
        module=functional,
        closure=tuple(map(capture_mode.original, constants)),
        num_outputs=num_outputs,
        written=written,
        modules=capture_mode.modules(),
        aux=aux[0],
        changed=Changes(),
        skipped=values.skipped,
        host=hosts[0],
        graded=[tensor for fake, tensor in capture_mode.standins() if fake.is_leaf and fake.grad is not None],
        num_draws=None if decomposes_draws(functional.graph) else values.position,
        axes=capture_mode.axes,
    )


def _functionalize(graph: torch.fx.GraphModule, inputs: list, keep: Keep) -> torch.fx.GraphModule:
    """Second pass: no mutation, and only operators that can be lowered where PyTorch can decompose the others."""
    ragged = is_ragged(graph)

    def replay(*args: torch.Tensor) -> PyTree:
        return (WithMasks(graph) if ragged else torch.fx.Interpreter(graph)).run(*args)

    table = {op: rule for op, rule in _decompositions(keep).items() if op not in FUNCTIONS}
    # what autocast was to cast it has cast in the first pass
    with _errors_for_users(), preserve_node_meta(), enable_python_dispatcher(), torch.no_grad(), autocast_only():
        functional = torch.func.functionalize(replay, remove="mutations")
        return make_fx(functional, decomposition_table=table, _allow_non_fake_inputs=True)(*inputs)


@functools.cache
def _decompositions(keep: Keep) -> dict:
    """PyTorch's core rules, and its other rules for what nobody lowers, except for the operators to keep whole."""
    core = core_aten_decompositions()
    table = {op: rule for op, rule in core.items() if not keep(op, True)}
    others = {op: rule for op, rule in decomposition_table.items() if op not in core and not keep(op, False)}
    return table | others | {op: functools.partial(_view_of_any_layout, op) for op in STRICT_VIEWS}


def _gradient_of_mean(rule: Callable[..., Any] | None, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    """A gradient by a rule; of no elements, by whose number PyTorch's own would divide, there is nothing to compute."""
    if any(type(size) is int and size == 0 for size in x.shape):  # others are known when the program runs
        return torch.zeros_like(x)
    return NotImplemented if rule is None else rule(grad, x, *args)


def _view_of_any_layout(view: Callable[..., torch.Tensor], x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A view that PyTorch's strides allow, of a tensor to which a decomposition gave other strides.

    Here the graph is functional, so that a copy does as well.
    """
    if x.is_contiguous():
        return NotImplemented
    try:
        with _disable_current_modes():
            torch.empty_strided(x.shape, x.stride(), device="meta").view(shape)
    except (RuntimeError, ValueError):
        return view(x.clone(memory_format=torch.contiguous_format), shape)
    return NotImplemented


_NO_FAKE_RULE = "There was no fake impl registered"

# How PyTorch says, in different places, that it has no values to give.
_VALUE_NEEDED = ("get value out of a tracing tensor", "Cannot access data pointer", ".numpy() is not supported")


_AFTER_A_SELECTION = (
    " What a mask has selected may be worked on element by element or row by row, and then be reduced or written back; "
    "here it meets {}."
)


_INSTEAD = (
    ", but a compiled program is made once for all values. Use torch.where(condition, a, b) instead of `if`, "
    "torch.cond for whole branches, a mask instead of a selection (`(x * mask).sum()` for `x[mask].sum()`), and keep "
    ".item(), .tolist(), float() and print() outside of the compiled function."
)


_OF_A_LIBRARY = (
    " This line is of a library, so look for an argument with which it goes another way, run the model once in eager "
    "torch first if it is about a first call, or leave this part out of the captured function."
)


def _instead(place: str) -> str:
    """What to do instead of what stands at a place."""
    return _INSTEAD + (_OF_A_LIBRARY if any(folder in place.splitlines()[0] for folder in INSTALLED) else "")


def _refuse_swallowed(graph: torch.fx.Graph, asked: str | None) -> None:
    """Refuse what asked for a value and went on without it, by a `try` of its own."""
    if asked is not None and any(node.target is aten._local_scalar_dense.default for node in graph.nodes):
        raise NotImplementedError(f"{asked}\nHere Python needs the value of a tensor{_instead(asked)}")


@contextlib.contextmanager
def _errors_for_users() -> Iterator[None]:
    """PyTorch's complaint that a value is needed becomes ours, with the user's file and line."""
    try:
        yield
    except Exception as error:
        if "We only support functionalizing operators" in str(error):
            raise NotImplementedError(f"An operator that writes in place cannot be captured: {error}") from error
        if isinstance(error, UnsupportedOperatorException) or _NO_FAKE_RULE in str(error):
            raise NotImplementedError(
                f"{user_frame(error)}\nHere an operator has no fake rule, which says the shapes and dtypes of its "
                f"results: {error}\nRegister one: @torch.library.register_fake('mylib::op')."
            ) from error
        if "at least two devices, meta and cpu" in str(error):
            raise NotImplementedError(
                f"{caller()}: a tensor of the meta device meets others: one of your own, or one that "
                "forward mode makes (torch.func.hessian, jacfwd, jvp) where a gradient is taken of it. Give yours "
                "values; write jacrev(jacrev(f)) for hessian(f)."
            ) from error
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

        unbacked = GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
        shape_depends = isinstance(error, (DynamicOutputShapeException, UnknownSizeError, *unbacked))
        value_needed = isinstance(error, DataDependentOutputException)
        if not shape_depends and not value_needed and not any(said in str(error) for said in _VALUE_NEEDED):
            raise
        asks = "the shape of a result depends on the values" if shape_depends else "Python needs the value"
        unknown = error if isinstance(error, UnknownSizeError) else None
        place = unknown.place if unknown else user_frame(error)
        raise NotImplementedError(
            f"{place}\nHere {asks} of a tensor{_instead(place)}"
            f"{_AFTER_A_SELECTION.format(str(unknown).splitlines()[0]) if unknown else ''}"
        ) from error
