"""A second capture, which tells whether a function reads what is at the places that it writes to, and what for.

A number that is written may be a sum of the old one, or of a plain number that is equal to it. A list that is appended
to may also be asked for its length, which is another one at each step. So stand-ins are put there, and the function is
captured again. If it is the same program, and no stand-in was asked, then no program depends on what is there.
"""

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_shard._capture.effect_plan import (
    EffectPlan,
    OtherwiseError,
    Unread,
    Write,
    expressions_in,
    is_at,
    is_plain_number,
    kind_of_value,
    template_if_absent,
)
from torch_shard._capture.effects import Effects
from torch_shard._capture.function_mode import outermost_mode
from torch_shard._capture.late_numbers import Item, LateNumber, Old, is_expression, leaves_of, plain
from torch_shard._capture.side_effects import ABSENT, Place
from torch_shard._capture.watched import is_watched, watched
from torch_shard._common.containers import as_tuple


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """What stands at a place during a second capture.

    Attributes:
        place: Where.
        before: What was there.
        value: What stands there.
        is_needed: Whether numbers of a step are kept there, so that the first capture cannot be used without knowing.
        template: What the first capture set there.
        instead: What is to stand there if the second capture reads what is there.
        within: The places in it whose numbers are late.
    """

    place: Place
    before: object
    value: Any
    is_needed: bool
    template: Any = None
    instead: "tuple[StandIn, ...]" = ()
    within: tuple[Place, ...] = ()

    @property
    def is_instead_of_nothing(self) -> bool:
        """Whether nothing was there."""
        return self.before is ABSENT or self.before is None

    @property
    def is_replaced(self) -> bool:
        """Whether the first capture put another value there."""
        return self.template is not None

    @property
    def unread(self) -> Unread:
        """That the function does not read what is there."""
        return Unread(self.place, frozenset((kind_of_value(self.before), kind_of_value(self.value))))


class StandIns:
    """What stands at the places of a first capture's writes in a second one.

    Args:
        effects: Of the first capture.
    """

    def __init__(self, effects: Effects) -> None:
        assert effects.made is not None
        self._first = effects
        self.asked = set[Hashable]()
        """Keys of the places whose numbers the second capture has asked for."""
        self.all = [*self._of_writes(effects.made), *self._of_counts()]

    def _of_writes(self, plan: EffectPlan) -> Iterator[StandIn]:
        for container, place in self._lists(plan):
            value = watched(container)
            yield StandIn(place, container, value, is_needed=True)
            for alias in self._first.holding(container):
                if alias.key != place.key:
                    yield StandIn(alias, container, value, is_needed=True)
        for write, before in zip(plan.writes, self._first.before, strict=True):
            if write.action == "set":
                yield from self._of_value(write.place, before, write.template)

    def _lists(self, plan: EffectPlan) -> Iterator[tuple[Any, Place]]:
        """The lists and queues that are added to, or all of whose items are set: they may have been emptied before."""
        written = {write.place.key for write in plan.writes}
        met = set[int]()
        for write in plan.writes:
            if write.action == "set":
                place, container = write.place.around(), write.place.container()
                is_wanted = isinstance(container, (list, collections.deque))
                if is_wanted:
                    is_wanted = all(place.within(index).key in written for index in range(len(container)))
            else:
                place, container = write.place, write.place.get()
                is_wanted = True
            if is_wanted and id(container) not in met:
                met.add(id(container))
                yield container, place

    def _of_value(self, place: Place, before: Any, template: Any) -> Iterator[StandIn]:
        """Of a value that is set, or of the numbers in a container that is."""
        is_nothing = before is ABSENT or before is None
        before = plain(before)
        is_needed = bool(expressions_in(template))

        if isinstance(template, Item) and template.kind is torch.Tensor:
            if is_nothing or isinstance(before, torch.Tensor):
                yield StandIn(place, before, self._first.like(template.position), is_needed, template)
        elif is_expression(template) or is_plain_number(template):
            if is_nothing or is_plain_number(before) or isinstance(before, str):
                kind = type(before)
                if is_nothing:
                    kind = template.kind if is_expression(template) else type(template)
                yield StandIn(place, before, self._old(place, kind), is_needed, template)
        elif is_nothing and isinstance(template, (list, dict, collections.deque)):
            # A copy is of the same class, with the same factory.
            empty = copy.copy(template)
            empty.clear()
            value = empty if isinstance(empty, dict) else watched(empty)
            yield StandIn(place, before, value, is_needed, template)
        elif isinstance(before, tuple) and type(before) is type(template) and all(map(is_plain_number, before)):
            within = tuple(place.within(index) for index in range(len(before)))
            items = [self._old(inner, type(item)) for inner, item in zip(within, before, strict=True)]
            yield StandIn(place, before, as_tuple(type(before), items), is_needed, template, within=within)
        elif isinstance(before, (list, tuple, collections.deque)) and type(before) is type(template):
            yield StandIn(place, before, watched(before), is_needed, template)
        elif type(before) is dict and type(template) is dict:
            numbers: list[StandIn] = []
            for key in sorted(template.keys() & before.keys(), key=str):
                numbers += self._of_value(place.within(key), before[key], template[key])
            yield StandIn(place, before, watched(before), is_needed, template, tuple(numbers))

    def _of_counts(self) -> Iterator[StandIn]:
        """Of plain numbers that the function has changed, or that are in what it writes."""
        counts = [*self._first.counted, *self._first.counted_in_modules]
        numbers: list[tuple[Place, object]] = [(count.place, count.before) for count in counts]
        numbers += [(place, place.get()) for place in self._first.sources]
        for place, before in numbers:
            if type(before) in (int, float):
                yield StandIn(place, before, self._old(place, type(before)), is_needed=False)

    def _old(self, place: Place, kind: type) -> LateNumber:
        return LateNumber(Old(place.key, kind), self._ask, note=_note, show=_show)

    def _ask(self, expression: Any) -> Any:
        self.asked.update(leaf.place for leaf in leaves_of(expression) if isinstance(leaf, Old))
        return _effects_now().ask(expression)

    def choices(self) -> Iterator[list[StandIn]]:
        """The stand-ins to try, in turn: all, without those that are asked, and without those instead of nothing."""
        made = _once_a_place(self.all)
        while True:
            self.asked.clear()
            yield made

            # A dict that is read may still have numbers that are not.
            in_parts: list[StandIn] = []
            for each in made:
                in_parts += each.instead if each.instead and _is_read(each) else (each,)
            if any(each not in made for each in in_parts):
                made = in_parts
                continue

            needed = [each for each in made if each.is_needed]
            fewer = (
                [each for each in made if each.is_needed or each.place.key not in self.asked],
                needed,
                [each for each in needed if not each.is_instead_of_nothing],
            )
            smaller = [choice for choice in fewer if len(choice) < len(made)]
            if not smaller:
                return
            made = smaller[0]

    def merged(self, second: Effects, made: Sequence[StandIn]) -> EffectPlan | None:
        """The plan of both captures, which are the same program; None if they do not do the same."""
        first, then = self._first.made, second.made
        assert first is not None
        assert then is not None
        if self._first.asked_at != second.asked_at or self.reads(then, made):
            return None
        places: dict[Hashable, Place] = {}
        for each in made:
            places.update((place.key, place) for place in (each.place, *each.within))
        numbers = {key: plain(place.get()) for key, place in places.items()}
        try:
            if not first.calls_alike(then, numbers):
                return None
            writes = tuple(self._with_absence(write, then, made, numbers) for write in then.writes)
        except OtherwiseError:
            return None

        # The second capture must write to all that the first has written to, or to what is around or within it.
        for write in first.writes:
            if not any(is_at(write.place, other.place) or is_at(other.place, write.place) for other in writes):
                return None

        plan = EffectPlan(then.calls, writes)
        if not places.keys() >= set(plan.old_numbers):
            return None
        old_places = {key: places[key] for key in plan.old_numbers}
        return dataclasses.replace(plan, old_places=old_places, unread=self.unread(then, made))

    def unread(self, plan: EffectPlan, made: Sequence[StandIn]) -> tuple[Unread, ...]:
        """The places that a second capture with these stand-ins has not read, and those at which nothing must be."""
        grown = _grown(plan, made)
        unread = [each.unread for each in made if not is_watched(each.value) or each in grown or each.is_replaced]
        absent = [each for each in self.all if each.is_needed and each.is_instead_of_nothing]
        left_out = [each for each in _once_a_place(absent) if each not in made]
        return (*unread, *(Unread(each.place, frozenset([kind_of_value(each.before)])) for each in left_out))

    def reads(self, plan: EffectPlan, made: Sequence[StandIn]) -> list[str]:
        """Lines that read what is in lists that a second capture adds to; the names of such as it has not met."""
        grown, lines = _grown(plan, made), list[str]()
        for each in made:
            is_watched_value = each.is_replaced and is_watched(each.value)
            if each in grown and not each.value.is_touched:
                lines.append(f"{each.place.name}, of which it has another name that is not seen")
            elif each in grown or is_watched_value:
                line = each.value.read_at or each.value.end_read_at
                if line:
                    lines.append(line)
        return lines

    def _with_absence(
        self, write: Write, plan: EffectPlan, made: Sequence[StandIn], numbers: Mapping[Hashable, Any]
    ) -> Write:
        """A write of the second capture, with what the first set where nothing was."""
        around = next((each for each in made if each.is_instead_of_nothing and is_at(each.place, write.place)), None)
        if around is None:
            return write
        template = template_if_absent(around.place, around.template, plan.writes, numbers)
        return dataclasses.replace(write, parent=around.place, if_absent=template)


def _is_read(stand_in: StandIn) -> bool:
    return is_watched(stand_in.value) and stand_in.value.read_at is not None


def _grown(plan: EffectPlan, made: Sequence[StandIn]) -> list[StandIn]:
    """The lists that are added to, under all their names."""
    grown = {write.place.key for write in plan.writes if write.action != "set"}
    values = {id(each.value) for each in made if each.place.key in grown}
    return [each for each in made if is_watched(each.value) and id(each.value) in values]


def _once_a_place(made: Sequence[StandIn]) -> list[StandIn]:
    return list({each.place.key: each for each in reversed(made)}.values())[::-1]


def _note(number: LateNumber) -> None:
    _effects_now().note(number)


def _show(number: LateNumber, spec: str) -> str:
    return _effects_now().show(number, spec)


def _effects_now() -> Effects:
    mode = outermost_mode()
    assert mode is not None
    return mode.effects


@contextlib.contextmanager
def standing_in(made: Sequence[StandIn]) -> Iterator[None]:
    """Let stand-ins be at their places."""
    before = [each.place.get() for each in made]
    for each in made:
        each.place.set(each.value)
    try:
        yield
    finally:
        # In reverse, as a place may be within another one.
        for each, value in zip(reversed(made), reversed(before), strict=True):
            if each.place.get() is each.value:
                each.place.set(value)
