"""What is done again after each step: writes and calls, with templates of what is written and told.

A template is a value with expressions (`Item`, `Old`, `Computed`) where numbers, texts and tensors of a step will be.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_shard._capture.calls import Handled, silent
from torch_shard._capture.late_numbers import (
    Computed,
    Item,
    LateNumber,
    Old,
    evaluate,
    is_expression,
    key_of,
    leaves_of,
    partly_evaluated,
)
from torch_shard._capture.side_effects import ABSENT, Place
from torch_shard._capture.watched import is_watched
from torch_shard._common.containers import mapped


class Reference:
    """A container that was there before, and is put somewhere as it is."""

    def __init__(self, container: object) -> None:
        self.container = container


def template_of(value: Any, leaf: Callable[[Any], Any], is_old: Callable[[object], bool]) -> Any:
    """A value with expressions for its late numbers, and copies of its containers.

    Args:
        value: The value.
        leaf: Gives what stands for a text or a tensor.
        is_old: Tells of a container whether it was there before.
    """
    if type(value) is LateNumber:
        return value.value if value.is_known else value.expression
    if isinstance(value, (str, torch.Tensor)):
        return leaf(value)
    if isinstance(value, (list, dict, collections.deque)) and is_old(value):
        return Reference(value)
    return mapped(value, lambda _, item: template_of(item, leaf, is_old))


def fill(template: Any, value_of: Callable[[Any], Any]) -> Any:
    """A new value of a template, with what `value_of` gives for each expression."""
    if is_expression(template):
        return value_of(template)
    if isinstance(template, Reference):
        return template.container
    return mapped(template, lambda _, item: fill(item, value_of))


def expressions_in(template: Any) -> list[Any]:
    """The expressions of a template, in order."""
    met: list[Any] = []
    fill(template, met.append)
    return met


def plain_numbers(template: Any) -> list[int | float]:
    """The plain numbers in a template and in its expressions."""
    if type(template) in (int, float):
        return [template]
    if isinstance(template, Computed):
        return [number for argument in template.args for number in plain_numbers(argument)]
    if isinstance(template, dict):
        return [number for item in template.values() for number in plain_numbers(item)]
    if isinstance(template, (list, tuple, collections.deque)):
        return [number for item in template for number in plain_numbers(item)]
    return []


def _template_key(template: Any) -> Hashable:
    """The same for templates that give the same."""
    if is_expression(template):
        return key_of(template)
    if isinstance(template, dict):
        return type(template), tuple((key_of(key), _template_key(item)) for key, item in template.items())
    if isinstance(template, (list, tuple, collections.deque)):
        return type(template), tuple(map(_template_key, template))
    return key_of(template.container if isinstance(template, Reference) else template)


def is_plain_number(value: object) -> bool:
    """Tell whether a value is a number of Python or of NumPy."""
    return isinstance(value, (bool, int, float, complex, np.number, np.bool_)) and type(value) is not LateNumber


def _is_number(template: Any) -> bool:
    """Tell whether a template is of one number."""
    return is_expression(template) and template.kind not in (str, torch.Tensor)


def _evaluated(
    template: Any,
    items: Mapping[int, Any],
    old: Mapping[Hashable, Any],
    tensor: Callable[[int, torch.dtype | None], torch.Tensor],
) -> Any:
    """A value of a template.

    Args:
        template: Of numbers, texts and tensors.
        items: The numbers in tensors, by position.
        old: The numbers of places, by key.
        tensor: Gives the tensor of a position, of this dtype.
    """

    def value_of(expression: Any) -> Any:
        if isinstance(expression, Item) and expression.kind is torch.Tensor:
            return tensor(expression.position, expression.dtype)
        return evaluate(expression, items, old)

    return fill(template, value_of)


@dataclasses.dataclass(frozen=True)
class Write:
    """What is done at a place after each step.

    Attributes:
        place: Where.
        action: `"set"` a value, or `"extend"`, `"prepend"` or `"refill"` a container by items.
        template: The value, or the list of the items.
        parent: What may be absent, or None: the place itself, or one around it.
        if_absent: The template of what is set at the parent where nothing is there, instead.
    """

    place: Place
    action: str
    template: Any
    parent: Place | None = None
    if_absent: Any = None

    @property
    def key(self) -> Hashable:
        """The same for writes of the same kind to the same place."""
        return self.place.key, self.action

    @property
    def changes_nothing(self) -> bool:
        """Tell whether a plain value is to be set that is there already."""
        if self.action != "set" or expressions_in(self.template):
            return False
        return _template_key(self.place.get()) == _template_key(self.template)


@dataclasses.dataclass(frozen=True)
class Unread:
    """A place of which a function reads nothing but what its plan says, as long as such a value is there.

    Attributes:
        place: Where.
        kinds: Those of values, as of `kind_of_value`.
    """

    place: Place
    kinds: frozenset[Hashable]

    @property
    def fits(self) -> bool:
        """Whether such a value is there now."""
        return kind_of_value(self.place.get()) in self.kinds


def kind_of_value(value: Any) -> Hashable:
    """What a function that does not read a value may still depend on."""
    if value is ABSENT or value is None:
        return str(value) if value is None else "absent"
    if type(value) is LateNumber:
        return str if value.expression.kind is str else "number"
    if is_plain_number(value):
        return "number"
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, collections.deque):
        return "queue", value.maxlen
    kind = value.base if is_watched(value) else type(value)
    return (kind, len(value)) if isinstance(value, tuple) else kind


@dataclasses.dataclass(frozen=True)
class WatchedCall:
    """A call that is made after each step.

    Attributes:
        function: What is called.
        template: Its positional and keyword arguments.
        dtypes: Of the tensors among them, by position among the items.
        of: What the function belongs to, for comparison.
    """

    function: Callable[..., Any]
    template: tuple[tuple[Any, ...], dict[str, Any]]
    dtypes: Mapping[int, torch.dtype]
    of: object

    def arguments(
        self, items: Mapping[int, Any], old: Mapping[Hashable, Any], tensor: Callable[[int], torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these numbers and tensors in it."""

        def value_of(expression: Any) -> Any:
            if isinstance(expression, Item) and expression.position in self.dtypes:
                return tensor(expression.position).to(self.dtypes[expression.position])
            return evaluate(expression, items, old)

        return fill(self.template, value_of)

    @property
    def function_key(self) -> Hashable:
        """The same for calls of the same function."""
        return id(self.of), getattr(self.function, "__name__", "")

    @property
    def key(self) -> Hashable:
        """The same for calls that are alike; what is no plain value is told apart by object."""
        return self.function_key, _template_key(self.template)


@dataclasses.dataclass(frozen=True)
class EffectPlan:
    """What is to be done after each step.

    Attributes:
        calls: In order.
        writes: All of one step at once.
        old_places: The places of the numbers before the step that templates have, by key.
        unread: The places that the function writes to, and does not read: a program does not depend on what they have.
    """

    calls: tuple[WatchedCall, ...] = ()
    writes: tuple[Write, ...] = ()
    old_places: Mapping[Hashable, Place] = dataclasses.field(default_factory=dict)
    unread: tuple[Unread, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.calls or self.writes)

    def agreed(self, other: "EffectPlan") -> "EffectPlan | None":
        """The plan of two captures of the same function, or None if they do not do the same."""
        if [call.key for call in self.calls] != [call.key for call in other.calls]:
            return None
        ours = {write.key: write for write in self.writes}
        theirs = {write.key: write for write in other.writes}
        for key in ours.keys() ^ theirs.keys():
            if not {**ours, **theirs}[key].changes_nothing:
                return None
        writes: list[Write] = []
        for key, write in {**theirs, **ours}.items():
            same = theirs.get(key, write)
            if _template_key(write.template) != _template_key(same.template):
                return None
            writes.append(same if write.parent is None else write)
        unread = {each.place.key: each for each in other.unread}
        for each in self.unread:
            kinds = each.kinds | unread.get(each.place.key, each).kinds
            unread[each.place.key] = Unread(each.place, kinds)
        return EffectPlan(other.calls, tuple(writes), {**self.old_places, **other.old_places}, tuple(unread.values()))

    def calls_alike(self, other: "EffectPlan", numbers: Mapping[Hashable, Any]) -> bool:
        """Tell whether another capture makes the same calls.

        Args:
            other: Its plan, in which numbers of places are known as such.
            numbers: These, which this plan has.

        Raises:
            OtherwiseError: Calls with other arguments.
        """
        join = _Join(None, numbers)
        for call, same in itertools.zip_longest(self.calls, other.calls):
            if call is None or same is None or call.function_key != same.function_key:
                return False
            join.joined(call.template, same.template)
        return True

    @property
    def positions(self) -> list[int]:
        """The positions of the tensors that it needs."""
        return sorted({leaf.position for leaf in self._leaves if isinstance(leaf, Item)})

    @property
    def old_numbers(self) -> list[Hashable]:
        """The keys of the places whose numbers before the step it needs."""
        return [leaf.place for leaf in self._leaves if isinstance(leaf, Old)]

    @property
    def _leaves(self) -> list[Item | Old]:
        templates = [*(call.template for call in self.calls), *(write.template for write in self.writes)]
        templates += [write.if_absent for write in self.writes]
        return [leaf for template in templates for each in expressions_in(template) for leaf in leaves_of(each)]

    def write(
        self,
        items: Mapping[int, Any],
        old: Mapping[Hashable, Any],
        tensor: Callable[[int, torch.dtype | None], torch.Tensor],
        put_off: Callable[[Any, Callable[[], Any]], LateNumber] | None,
    ) -> list[tuple[Place | None, Any, LateNumber]]:
        """Do the writes of a step.

        Args:
            items: The numbers in tensors, by position.
            old: The numbers of places, by key.
            tensor: Gives the tensor of a position, of this dtype.
            put_off: Makes a late number of an expression and of what computes its value, where that takes waiting.

        Returns:
            The late numbers that were written: the place, or the container that they were added to.
        """
        late: list[tuple[Place | None, Any, LateNumber]] = []

        def value_of(template: Any) -> Any:
            if put_off is None or not _is_number(template):
                return _evaluated(template, items, old, tensor)
            return put_off(template, functools.cache(lambda: _evaluated(template, items, old, tensor)))

        def set_at(place: Place, template: Any) -> None:
            value = value_of(template)
            place.set(value)
            if type(value) is LateNumber:
                late.append((place, None, value))

        made = set[int]()
        for write in self.writes:
            parent = write.parent
            is_made = id(parent) in made
            if parent is not None and (is_made or parent.get() is ABSENT or parent.get() is None):
                # What is set there has what the other writes within it would have added.
                if not is_made:
                    set_at(parent, write.if_absent)
                made.add(id(parent))
            elif write.action == "set":
                set_at(write.place, write.template)
            else:
                container = write.place.get()
                values = [value_of(template) for template in write.template]
                _add(container, write.action, values)
                late += [(None, container, value) for value in values if type(value) is LateNumber]
        return late

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let nothing remain of what is done within: the loss runs in eager torch, for comparison."""
        values = [place.get() for place in self.places]
        contents = [copy.copy(value) for value in values]
        loggers = any(isinstance(call.function, Handled) for call in self.calls)
        with silent(loggers=loggers):
            try:
                yield
            finally:
                for place, value, items in zip(self.places, values, contents, strict=True):
                    _put_back(place, value, items)

    @property
    def places(self) -> tuple[Place, ...]:
        """The places that a step writes to."""
        return tuple(write.parent or write.place for write in self.writes)

    def sets(self, place: Place) -> bool:
        """Tell whether a value is set at a place, or in what is around it."""
        return any(is_at(write.place, place) for write in self.writes if write.action == "set")

    @property
    def unread_places(self) -> tuple[Place, ...]:
        """The places that a program does not depend on."""
        return tuple(each.place for each in self.unread)

    def outdated(self) -> str | None:
        """The name of a place at which something is, or is not, that the plan is not for."""
        return next((each.place.name for each in self.unread if not each.fits), None)


def _add(container: Any, action: str, values: list[Any]) -> None:
    if action == "refill":
        container.clear()
    if action in ("extend", "refill"):
        container.extend(values)
    elif isinstance(container, collections.deque):
        container.extendleft(reversed(values))
    else:
        container[:0] = values


def _put_back(place: Place, value: Any, contents: Any) -> None:
    """Give a place the value that it had, and that the items that it had."""
    place.set(value)
    if isinstance(value, dict):
        value.clear()
        value.update(contents)
    elif isinstance(value, list):
        value[:] = contents
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(contents)


# ---- the plan of two captures of one function ----


class OtherwiseError(Exception):
    """Where nothing was at a place, the function does something else than where something was."""


def template_if_absent(place: Place, template: Any, writes: Sequence[Write], before: Mapping[Hashable, Any]) -> Any:
    """What is set at a place where nothing is.

    Args:
        place: Where.
        template: What a capture wrote there when nothing was there.
        writes: Of a capture when something was there, which tells numbers of other places.
        before: These numbers at the first capture.
    """
    numbers = plain_numbers(template)
    is_known_elsewhere = any(key_of(number) == key_of(value) for number in numbers for value in before.values())
    try:
        return _joined_if_absent(place, template, writes, _Join(place.key, before))
    except OtherwiseError:
        if is_known_elsewhere:
            raise
        return template


def _joined_if_absent(place: Place, template: Any, writes: Sequence[Write], join: "_Join") -> Any:
    for write in writes:
        if not is_at(place, write.place):
            continue
        keys = write.place.keys[len(place.keys) :]
        is_whole = not keys
        if is_whole and write.action == "set":
            template = join.joined(template, write.template)
        elif is_whole:
            template = join.joined(template, type(template)(write.template))
        elif len(keys) == 1 and write.action == "set" and isinstance(template, dict) and keys[0] in template:
            joined = join.joined(template[keys[0]], write.template)
            template = copy.copy(template)
            template[keys[0]] = joined
        else:
            raise OtherwiseError
    return template


class _Join:
    """The template of a capture without something at a place, in which another one with it tells old numbers.

    Args:
        own: The place, whose old number is as the first capture has it.
        before: The plain numbers of other places at the first capture.
    """

    def __init__(self, own: Hashable, before: Mapping[Hashable, Any]) -> None:
        self._own, self._before = own, before
        self._others = {key: number for key, number in before.items() if key != own and number is not ABSENT}

    def joined(self, first: Any, second: Any) -> Any:
        """Join the templates of the first and of the second capture.

        Raises:
            OtherwiseError: They do not do the same.
        """
        if isinstance(second, Old):
            return self._old(first, second)
        if is_expression(second) and self._is_alike(first, second):
            return second
        if all(isinstance(each, Computed) for each in (first, second)):
            return self._computed(first, second)
        if type(first) is not type(second):
            raise OtherwiseError
        if isinstance(second, (dict, list, tuple, collections.deque)):
            if len(first) != len(second) or (isinstance(second, dict) and first.keys() != second.keys()):
                raise OtherwiseError
            return mapped(second, lambda key, item: self.joined(first[key], item))
        if _template_key(first) != _template_key(second):
            raise OtherwiseError
        return second

    def _is_alike(self, first: Any, second: Any) -> bool:
        """Tell whether an expression with the numbers of other places in it is what the first capture has."""
        return key_of(partly_evaluated(second, self._others)) == key_of(first)

    def _computed(self, first: Computed, second: Computed) -> Computed:
        if first.function != second.function or len(first.args) != len(second.args):
            raise OtherwiseError
        pairs = zip(first.args, second.args, strict=True)
        return Computed(second.function, tuple(self.joined(a, b) for a, b in pairs), second.kind)

    def _old(self, first: Any, second: Old) -> Any:
        if second.place == self._own:
            return first
        same = self._before.get(second.place, ABSENT)
        if key_of(first) != key_of(second) and (same is ABSENT or key_of(first) != key_of(same)):
            raise OtherwiseError
        return second


def is_at(place: Place, other: Place) -> bool:
    """Tell whether another place is this one, or within it."""
    return other.key[0] == place.key[0] and other.keys[: len(place.keys)] == place.keys
