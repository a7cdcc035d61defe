"""What Python does with numbers of a capture besides computing the loss: kept, taken back, and done again.

While a loss is captured, `tensor.item()` gives a `LateNumber`. Where such numbers are when the loss has returned (in a
list, a dict, an attribute, a global or an enclosing variable) is an effect: a `Write`. Calls that only tell (`print`, a
logger, the `update` of a metric object) are effects, too: a `WatchedCall`. The capture takes all writes back. After
each step they are done again with the step's own values.
"""

import contextlib
import functools
import gc
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.calls import Handled, on_metrics, refuse_metric, telling
from torch_shard._capture.checks import asks_for_types, leads_only_to_raise, only_tells_text
from torch_shard._capture.data_dependence import current_values
from torch_shard._capture.effect_plan import (
    EffectPlan,
    WatchedCall,
    Write,
    expressions_in,
    plain_numbers,
    template_of,
)
from torch_shard._capture.function_mode import current_mode
from torch_shard._capture.late_numbers import (
    OF_A_TEXT,
    Computed,
    Item,
    LateNumber,
    Old,
    evaluate,
    is_expression,
    is_late,
    leaves_of,
    patched_math,
)
from torch_shard._capture.provenance import (
    asking_frame,
    calls_seen,
    current_user_line,
    is_asked_by_torch,
    is_own_file,
)
from torch_shard._capture.side_effects import Kept, Place, is_plain
from torch_shard._common.overrides import instead_of
from torch_shard._common.patching import patched

MOST_LISTED = 1024
"""Elements of a tensor that `tolist()` gives as late numbers."""

_SHOWN_ALIKE = (type(None), torch.dtype, torch.device)
"""Types, besides those of numbers and texts, whose values are shown alike at all times."""

_END_OF_A_TEXT = "\ufdd1"
_TEXT = re.compile(f"{OF_A_TEXT}(\\d+){_END_OF_A_TEXT}")


class Effects:
    """The late numbers of the capture under way, and what is done with them.

    Attributes:
        made: The plan, once the loss has returned.
        before: What was at the places of its writes.
        counted: Plain numbers that the function has changed, outside of modules.
        counted_in_modules: The same in modules, which take them back.
        sources: Places with plain numbers that are in what it writes.
        asked_at: The instructions that asked for the numbers, in order.
    """

    def __init__(self) -> None:
        self._mode, self._values = current_mode(), current_values()
        self.made: EffectPlan | None = None
        self.before: list[object] = []
        self.counted: list[Kept] = []
        self.counted_in_modules: list[Kept] = []
        self.sources: list[Place] = []
        self.asked_at: list[tuple[int, int]] = []
        self._tensors: list[torch.Tensor] = []
        self._numbers: list[weakref.ref[LateNumber]] = []
        self._texts: list[tuple[Any, str, str]] = []
        self._told: set[int] = set()
        self._calls: list[WatchedCall] = []

    # -- numbers --

    def number(self, tensor: torch.Tensor) -> Any:
        """The only element of a tensor: itself if it is known, else a late number."""
        known = self._values.known_values([tensor])
        if known is not None:
            return known[0].item()
        frame = asking_frame(within_torch=False)
        if frame is not None and asks_for_types(frame.f_code):
            with torch._C.DisableTorchFunction():
                return tensor.item()
        assert self._mode is not None
        if self._mode.answers_at_once and (answers := self._values.values([tensor])) is not None:
            return answers[0].item()
        self.asked_at.append((id(frame.f_code), frame.f_lasti) if frame else (0, 0))
        return self._late(Item(self._keep(tensor), _kind_of(tensor.dtype)))

    def numbers(self, tensor: torch.Tensor) -> Any:
        """The elements of a tensor as nested lists of late numbers."""
        if tensor.ndim == 0:
            return self.number(tensor)
        return [self.numbers(part) for part in tensor.unbind()]

    def _keep(self, tensor: torch.Tensor) -> int:
        """Let the program give the present value of a tensor; returns its position."""
        with torch._C.DisableTorchFunction():
            self._tensors.append(tensor.detach().clone())
        return len(self._tensors) - 1

    def _late(self, expression: Any) -> LateNumber:
        number = LateNumber(expression, self.ask, note=self.note, show=self.show)
        self.note(number)
        return number

    def note(self, number: LateNumber) -> None:
        self._numbers.append(weakref.ref(number))

    def ask(self, expression: Any) -> Any:
        """Give the value that Python asks for, or refuse."""
        if isinstance(expression, Computed) and expression.kind is bool:
            frame = asking_frame()
            truth = None if frame is None else leads_only_to_raise(frame)
            if truth is not None:
                self._values.skipped.append(current_user_line())
                return truth
        for leaf in leaves_of(expression):
            if isinstance(leaf, Old):
                self._values.refused = (
                    f"{current_user_line()}\nHere Python asks for a number that the captured function itself keeps of "
                    "its steps, as a sum, a mean or a count, so that the program would be another one at each step. "
                    "Ask for it after the step, or pass it in the batch."
                )  # also where the callable catches the error
                raise NotImplementedError(self._values.refused)
        with torch._C.DisableTorchFunction():
            items = {leaf.position: self._tensors[leaf.position].item() for leaf in leaves_of(expression)}  # pyright: ignore
        return evaluate(expression, items, {})

    # -- texts --

    def show(self, number: LateNumber, spec: str) -> str:
        """Let characters stand for a number in a text that is only told; whoever tells the text fills them in."""
        frame = asking_frame(within_torch=False)
        if frame is None or not only_tells_text(frame):
            return format(self._asked_for_text(number.expression), spec)
        self._texts.append((number.expression, spec, current_user_line()))
        return f"{OF_A_TEXT}{len(self._texts) - 1}{_END_OF_A_TEXT}"

    def _asked_for_text(self, expression: Any) -> Any:
        try:
            return self.ask(expression)
        except DataDependentOutputException as error:
            self._values.refused = _text_refused(current_user_line())
            raise NotImplementedError(self._values.refused) from error

    def _template(self, value: Any, leaf: Callable[[Any], Any]) -> Any:
        assert self._mode is not None
        containers = self._mode.side_effects.containers()
        return template_of(value, leaf, lambda container: id(container) in containers)

    def _leaf(self, leaf: Any) -> Any:
        """What stands for a text or a tensor in a template."""
        if isinstance(leaf, str):
            return self._text(leaf)
        return Item(self._keep(leaf), torch.Tensor, leaf.dtype) if self._is_kept(leaf) else leaf

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is of this capture, and depends on its inputs."""
        assert self._mode is not None
        if not hasattr(tensor, "fake_mode") or not self._mode.is_of_capture(tensor):
            return False
        return self._values.is_traced(tensor) and self._values.known_values([tensor]) is None

    def _is_read(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor from outside is read in this capture."""
        assert self._mode is not None
        return self._mode.has_standin(tensor)

    def _text(self, text: str) -> Any:
        """The template of a text."""
        parts = _TEXT.split(text)
        if len(parts) == 1:
            return text
        formats: list[Any] = []
        for index in map(int, parts[1::2]):
            self._told.add(index)
            formats.append(self._texts[index])
        return Computed(_Joined(parts[::2], [spec for _, spec, _ in formats]), tuple(e for e, _, _ in formats), str)

    # -- calls --

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Note what is done within."""
        assert self._mode is not None
        self._mode.effects = self
        with contextlib.ExitStack() as stack:
            for context in (*patched_math(), *self._watched()):
                stack.enter_context(context)
            yield

    def _watched(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        yield from on_metrics(self._update)
        for owner, name in telling():
            yield patched(owner, name, self._instead_of_telling)
        yield patched(logging.Logger, "handle", self._instead_of_handling)

    def _instead_of_telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def tell(*args: Any, **kwargs: Any) -> Any:
            is_method = "." in original.__qualname__
            told = [*args[is_method:], *(value for name, value in kwargs.items() if name != "file")]
            is_told_later = _has_any_without_value((args, kwargs)) or is_plain(told, _SHOWN_ALIKE)
            if not is_told_later or current_mode() is not self._mode:
                return original(*args, **kwargs)
            self._call(original, args, kwargs, of=original)
            return None

        return tell

    def _instead_of_handling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            about = {name: value for name, value in vars(record).items() if _has_any_without_value(value)}
            is_plain_one = is_own_file(record.pathname) and is_plain((record.msg, record.args), _SHOWN_ALIKE)
            if not (about or is_plain_one) or current_mode() is not self._mode:
                original(logger, record)
                return
            self._call(
                Handled(logger, record, original), (), {"msg": record.msg, "args": record.args, **about}, of=logger
            )

        return handle

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any, *, of: object) -> None:
        dtypes: dict[int, torch.dtype] = {}

        def leaf(value: Any) -> Any:
            if isinstance(value, str):
                return self._text(value)
            if not _has_no_value(value):
                return value
            kept = Item(self._keep(value), torch.Tensor)
            dtypes[kept.position] = value.dtype
            return kept

        self._calls.append(WatchedCall(function, self._template((args, kwargs), leaf), dtypes, of))

    def tell_what_is_known(self) -> None:
        """Make the calls that have no number of a step in them."""
        for call in self._calls:
            if not expressions_in(call.template):
                args, kwargs = call.template
                call.function(*args, **kwargs)

    def _update(self, metric: object, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if current_mode() is not self._mode:
            refuse_metric(metric)
        self._call(update, args, kwargs, of=metric)

    # -- the end of the capture --

    def as_tensors(self, metric: Any) -> Any:
        """A metric with tensors in the places of late numbers."""
        items = dict(enumerate(self._tensors))

        def tensor(leaf: Any) -> Any:
            return evaluate(leaf.expression, items, {}) if type(leaf) is LateNumber and not leaf.is_known else leaf

        return torch_pytree.tree_map(tensor, metric)

    def plan(self) -> EffectPlan:
        """What is to be done after each step, now that the loss has returned."""
        assert self._mode is not None
        with calls_seen(False):  # who sees calls keeps objects that are made in them
            kept = list(self._mode.side_effects.kept(self._is_kept, self._is_read))
            self.before = [each.before for each in kept]
            writes = tuple(Write(each.place, each.action, self._template(each.value, self._leaf)) for each in kept)
            self.counted = list(self._mode.side_effects.counted(of_modules=False))
            self.counted_in_modules = list(self._mode.side_effects.counted(of_modules=True))
            numbers = [number for write in writes for number in plain_numbers(write.template)]
            self.sources = [place for number in numbers for place in self._mode.side_effects.holding(number)]
        self.made = plan = EffectPlan(tuple(self._calls), writes)
        lost = [line for index, (_, _, line) in enumerate(self._texts) if index not in self._told]
        if lost:
            raise NotImplementedError(_text_refused(lost[0]))
        return plan

    @property
    def may_be_known(self) -> bool:
        """Whether the host may be able to tell late numbers before the call."""
        return bool(self._numbers) and self._values.has_inputs and not self._left()

    def like(self, position: int) -> torch.Tensor:
        """A tensor without memory that is like the one of a position."""
        tensor = self._tensors[position]
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    def holding(self, value: object) -> list[Place]:
        """The places that held this very object before."""
        assert self._mode is not None
        return list(self._mode.side_effects.holding(value))

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that the plan needs, or that of an earlier capture like this one, by position."""
        assert self._mode is not None
        assert self.made is not None
        positions = {*self.made.positions, *self._mode.items_wanted}
        return {position: self._tensors[position] for position in sorted(positions) if position < len(self._tensors)}

    def _left(self) -> list[LateNumber]:
        """The late numbers that somebody still has."""
        numbers = (ref() for ref in self._numbers)
        return [number for number in numbers if number is not None]

    def check_taken_back(self) -> None:
        """Refuse numbers that are still somewhere, now that all that was seen is as it was."""
        if not self._left():
            return
        gc.collect()  # of cycles, of an error that was caught
        left = self._left()
        if not left:
            return
        assert self._mode is not None
        self._mode.side_effects.restore(is_whole=True)
        holders = [type(holder).__name__ for holder in gc.get_referrers(left[0]) if holder is not left]
        raise NotImplementedError(
            "The captured function keeps a number of the step "
            + (f"(in a {', a '.join(dict.fromkeys(holders))}) " if holders else "")
            + "where it is not seen: in a new object, in a container of C. What is done again "
            "after each step is an append to a list, an item of a dict, an attribute, a global or an enclosing "
            "variable. Keep it there, or return it in the metrics."
        )


def _text_refused(line: str) -> str:
    return (
        f"{line}\nHere a number of the step becomes a part of a text, and nobody is seen to keep it. What is done "
        "again after each step is print, a message of a logger, and a text that is appended to a list or set as an "
        "attribute or an item, where the text stands in the call or in a variable that is used for nothing else. Make "
        "the text after the step."
    )


class _Joined:
    """Joins the parts of a text with numbers between them."""

    def __init__(self, parts: Sequence[str], specs: Sequence[str]) -> None:
        self._parts, self._specs = tuple(parts), tuple(specs)

    def __call__(self, *numbers: Any) -> str:
        shown = [*map(format, numbers, self._specs), ""]
        return "".join(part + number for part, number in zip(self._parts, shown, strict=True))

    def partly(self, numbers: Sequence[Any]) -> Computed:
        """The text with the numbers that are known: of the others there are expressions."""
        parts, specs, others = [self._parts[0]], list[str](), list[Any]()
        for number, spec, part in zip(numbers, self._specs, self._parts[1:], strict=True):
            if is_expression(number):
                parts.append(part)
                specs.append(spec)
                others.append(number)
            else:
                parts[-1] += format(number, spec) + part
        return Computed(_Joined(parts, specs), tuple(others), str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Joined) and (self._parts, self._specs) == (other._parts, other._specs)

    def __hash__(self) -> int:
        return hash((self._parts, self._specs))


def _has_any_without_value(value: object) -> bool:
    return any(map(_has_no_value, torch_pytree.tree_leaves(value)))


def _has_no_value(leaf: object) -> bool:
    """Tell whether an argument has no value yet."""
    if isinstance(leaf, torch.Tensor):
        return hasattr(leaf, "fake_mode")
    return is_late(leaf)


def _kind_of(dtype: torch.dtype) -> type:
    if dtype is torch.bool:
        return bool
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else int


def effects_of_capture() -> Effects | None:
    """Those of the capture under way, if they are done again."""
    mode = current_mode()
    return None if mode is None else mode.effects


def _effects_for_asker() -> Effects | None:
    """The same, unless it is a function of PyTorch that asks."""
    return None if is_asked_by_torch() else effects_of_capture()


@instead_of(torch.Tensor.item)
def item(tensor: torch.Tensor) -> Any:
    """The number in a tensor."""
    effects = _effects_for_asker()
    return torch.Tensor.item(tensor) if effects is None or tensor.numel() != 1 else effects.number(tensor)


@instead_of(torch.Tensor.tolist)
def tolist(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor."""
    values = current_values().values([tensor])
    if values is not None:
        return values[0].tolist()
    effects = _effects_for_asker()
    if effects is None or tensor.numel() > MOST_LISTED:
        return torch.Tensor.tolist(tensor)
    return effects.numbers(tensor)
