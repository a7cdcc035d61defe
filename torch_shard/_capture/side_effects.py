"""What a captured callable does to the objects that it reaches: noticed, and taken back to the bit."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from typing import Any, TypeGuard

import torch
from torch import nn

from torch_shard._capture.late_numbers import is_late
from torch_shard._capture.watched import WatchedDeque, WatchedDict, WatchedList, is_watched
from torch_shard._common.containers import Same

NUMBERS = (bool, int, float, str)

ENTRIES = ("_parameters", "_buffers")

_CONTAINERS = (
    list,
    dict,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
    WatchedList,
    WatchedDeque,
    WatchedDict,
)

_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)

_OF_TORCH = frozenset(vars(nn.Module())) - _HOOKS

_LOOKED_AFTER = ("_flat_weights", "_flat_weight_refs")  # by torch.nn.RNNBase, which compares them in each forward

ABSENT = object()

_DEPTH, _MOST = 4, 1000

IsKept = Callable[[torch.Tensor], bool]


class _Alone(dict[str, object]):
    """Holds a container that is known by itself, and not by where it hangs."""

    @property
    def container(self) -> object:
        """The container."""
        return next(iter(self.values()))


class _Slots:
    """The attributes of an object that has slots for them, by name.

    Args:
        container: The object.
    """

    def __init__(self, container: object) -> None:
        self.container = container

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.container, name)
        except AttributeError as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self.container, name, value)

    def pop(self, name: str, default: object) -> None:
        """Take an attribute away, if it is there."""
        if hasattr(self.container, name):
            delattr(self.container, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where a value is: by keys, from a dict of attributes or globals, or from an enclosing variable, on.

    Containers may be others at each step, so that a place is known by where it hangs.

    Attributes:
        name: For messages.
        owner: A dict, a cell of a function, or the slots of an object.
        keys: The first of the owner, the others of what is there.
    """

    name: str
    owner: Any
    keys: tuple[Any, ...]

    @property
    def key(self) -> tuple[int, tuple[Hashable, ...]]:
        """The same for the same place, in all captures."""
        owner = self.owner.container if isinstance(self.owner, (_Alone, _Slots)) else self.owner
        return id(owner), tuple(key if isinstance(key, (str, int)) else id(key) for key in self.keys)

    def within(self, key: object) -> "Place":
        """The place of an item of the container that is here."""
        return Place(f"{self.name}[{key!r}]", self.owner, (*self.keys, key))

    def around(self) -> "Place":
        """The place of the container that holds the value."""
        return Place(self.name, self.owner, self.keys[:-1])

    def container(self) -> Any:
        """What holds the value.

        Raises:
            LookupError: There is no such container.
        """
        container = self.owner
        for key in self.keys[:-1]:
            container = container.cell_contents if isinstance(container, types.CellType) else container[key]
        return container

    def holder(self) -> Any:
        """The same, or the object itself whose attribute the value is."""
        container = self.container()
        return container.container if isinstance(container, _Slots) else container

    def get(self) -> Any:
        """The value now, or `ABSENT`."""
        try:
            container = self.container()
            if isinstance(container, types.CellType):
                return container.cell_contents
            if isinstance(container, dict):
                # Past what a subclass makes of a missing key: a defaultdict would get an item.
                return dict.get(container, self.keys[-1], ABSENT)
            return container[self.keys[-1]]
        except (LookupError, ValueError):  # the latter of a cell that nothing is assigned to
            return ABSENT

    def set(self, value: object) -> None:
        """Put a value there; `ABSENT` takes it away."""
        container = self.container()
        if isinstance(container, types.CellType):
            container.cell_contents = value
        elif value is ABSENT:
            container.pop(self.keys[-1], None)
        else:
            container[self.keys[-1]] = value


@dataclasses.dataclass(frozen=True)
class Kept:
    """Numbers of a capture that it leaves at a place.

    Attributes:
        place: Where; a container for `"extend"`, `"prepend"` and `"refill"`.
        action: What happens there: a value is set; items are added to a container at its end or its beginning, or take
            the places of all that were in it.
        before: The value that was there; `ABSENT` if none.
        value: The value, or the list of the items.
    """

    place: Place
    action: str
    before: object
    value: Any


@dataclasses.dataclass(frozen=True)
class Change:
    """An attribute that a callable left with another value."""

    path: str
    attributes: dict[str, object]
    name: str
    old: object
    new: object
    of_object: bool = True

    @property
    def what(self) -> str:
        """The attribute, for messages."""
        return f"the plain attribute {self.path}" if self.of_object else self.path

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in what was left."""
        return [leaf for leaf in _leaves(self.new) if isinstance(leaf, torch.Tensor)]

    @property
    def is_new(self) -> bool:
        """Whether there was no such attribute."""
        return self.old is ABSENT

    @property
    def matters(self) -> bool:
        """Tell whether the next call may be another program for it."""
        if self.name in _LOOKED_AFTER:
            return False
        return bool(self.tensors) or self.name in _HOOKS or is_plain(self.new)

    def added(self) -> dict[str, object]:
        """What is new in a dict, such as that of a module's buffers."""
        if not isinstance(self.new, dict):
            return {}
        old = self.old if isinstance(self.old, dict) else {}
        added: dict[str, object] = {}
        for key, value in self.new.items():
            # An entry of None, as of `register_buffer("mask", None)`, is no entry yet.
            if value is not None and old.get(key) is None:
                added[key] = value
        return added


@dataclasses.dataclass(frozen=True)
class _Noted:
    """Attributes of one object, as they were.

    Attributes:
        path: Its name.
        owner: The object, kept alive.
        values: Its attributes.
        contents: Of the containers among these.
        skipped: Attributes to be left alone, but for tensors of a capture in them.
        whole: Whether all changes are taken back, not only tensors and numbers that a capture has left.
        home: Where a container hangs that is noted by itself.
    """

    path: str
    owner: object
    values: dict[str, object]
    contents: dict[str, object]
    skipped: tuple[str, ...]
    whole: bool
    home: Place | None = None

    @property
    def now(self) -> dict[str, object]:
        """The attributes as they are."""
        return self.values if type(self.owner) in _CONTAINERS else vars(self.owner)

    def place(self, name: str) -> Place:
        """The place of an attribute."""
        if self.home is not None:
            return self.home
        return Place(f"{self.path}.{name}" if self.path else name, self.now, (name,))


class SideEffects:
    """Attributes and hooks of modules, and of what hangs on them, as they were before a capture."""

    def __init__(self) -> None:
        self._before: dict[int, _Noted] = {}
        self._variables: dict[tuple[int, object], tuple[Place, object]] = {}
        self._slots: dict[int, _Slots] = {}
        self._done_again = set[tuple[int, object]]()
        self._room = _MOST  # for other objects that hang on one module

    def note(self, modules: Iterable[tuple[str, nn.Module]], *, entries: bool) -> None:
        """Remember the present attributes of modules, given with their names, unless that was done before.

        Args:
            modules: As of `named_modules`.
            entries: Whether parameters and buffers are the user's own now: within `torch.func.functional_call` the
                places hold others.
        """
        for path, module in modules:
            self._note(path, module, () if entries else ENTRIES, _DEPTH)

    def note_variable(self, name: str, owner: Any, key: str) -> None:
        """Remember the value of a global, or of a variable of an enclosing function, and what is in it."""
        place = Place(name, owner, (key,))
        value = place.get()
        if (id(owner), key) not in self._variables:
            self._variables[id(owner), key] = place, value
        if not isinstance(value, nn.Module):  # which holds fakes now that are not its own
            self.note_value(name, value, place)

    def note_value(self, name: str, value: object, home: Place | None = None) -> None:
        """Remember the contents of something that a function reaches by a name."""
        if isinstance(value, nn.Module):
            self.note(value.named_modules(prefix=name), entries=True)
            return
        if type(value) in _CONTAINERS and id(value) not in self._before:
            contents: dict[str, object] = {name: contents_of(value)}
            self._before[id(value)] = _Noted("", value, _Alone({name: value}), contents, (), False, home)
        self._look_into(name, value, _DEPTH)

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module was there before the callable ran."""
        return id(module) in self._before

    def path(self, module: nn.Module) -> str:
        """The path of a module; empty where it is not known, too."""
        noted = self._before.get(id(module))
        return noted.path if noted else ""

    def new_buffers(self) -> list[torch.Tensor]:
        """The buffers that modules have now and had not."""
        buffers: list[torch.Tensor] = []
        for noted in self._before.values():
            module = noted.owner
            # A scripted module has its buffers elsewhere, and no new ones.
            if not isinstance(module, nn.Module) or "_buffers" not in noted.contents:
                continue
            buffers_before = dict_of(noted.contents["_buffers"])
            for name, buffer in module._buffers.items():
                if buffer is not None and buffers_before.get(name) is None:
                    buffers.append(buffer)
        return buffers

    def training(self, module: nn.Module) -> bool:
        """The training flag that a module had."""
        noted = self._before.get(id(module))
        # one that torch.compile or torch.jit.script made has it elsewhere
        return bool(module.training if noted is None else noted.values.get("training", module.training))

    def _note(self, path: str, owner: object, skipped: tuple[str, ...], depth: int) -> None:
        if id(owner) in self._before:
            return
        self._room = _MOST if isinstance(owner, nn.Module) else self._room - 1
        values = dict(vars(owner))
        contents: dict[str, object] = {}
        for name, value in values.items():
            if type(value) in _CONTAINERS:
                contents[name] = contents_of(value)

        whole = isinstance(owner, nn.Module) or is_record(owner)
        self._before[id(owner)] = _Noted(path, owner, values, contents, skipped, whole)
        for name, value in values.items():
            if name not in _OF_TORCH:
                self._look_into(f"{path}.{name}" if path else name, value, depth - 1)

    def _look_into(self, path: str, value: object, depth: int) -> None:
        """Remember the objects of the user's classes in a value."""
        if depth < 0 or not self._room:
            return
        if isinstance(value, functools.partial):
            value = (value.func, *value.args, value.keywords)
        elif isinstance(value, types.FunctionType):
            for name, content in _closed_over(value):
                self._look_into(name, content, depth - 1)
            value = (*(value.__defaults__ or ()), value.__kwdefaults__ or {})
        elif isinstance(value, types.MethodType) and not isinstance(value.__self__, nn.Module):
            value = value.__self__

        if _is_container(value):
            for item in _items(value)[:_MOST]:
                self._look_into(path, item, depth - 1)
        elif isinstance(value, nn.Module):
            self.note(value.named_modules(prefix=path), entries=False)
        elif is_record(value) or (_is_of_user(value) and hasattr(value, "__dict__")):
            self._note(path, value, (), depth)
        elif _is_of_user(value) and id(value) not in self._slots:
            self._room -= 1
            slots = self._slots[id(value)] = _Slots(value)
            for name in _slots_of(value):
                self.note_variable(f"{path}.{name}", slots, name)

    def kept(self, is_kept: IsKept, is_read: IsKept) -> Iterator[Kept]:
        """What of the capture's numbers and tensors is now where something else was, or nothing; once for a container.

        Args:
            is_kept: Tells of a tensor of the capture whether it can be put there after each call.
            is_read: Tells of a tensor from outside whether the capture has read it.
        """
        seen = set[tuple[int, Hashable]]()
        seen_containers = set[int]()
        for kept, source in self._all_kept(is_kept):
            # A tensor that one call gives to the next would be an input of the program: only a buffer is.
            if any(isinstance(leaf, torch.Tensor) and is_read(leaf) for leaf in _leaves(kept.before)):
                continue

            is_item = kept.action == "set"
            holder = kept.place.container() if is_item else kept.place.get()
            key = kept.place.keys[-1] if is_item else kept.action
            self._done_again.add(source)
            if (id(holder), key) in seen:  # the same container, by another name
                continue
            seen.add((id(holder), key))

            containers = list(_containers_in(kept.value))
            if not is_item:
                containers.insert(0, holder)
            for container in containers:
                if id(container) in seen_containers:
                    raise _cannot_be_repeated(kept.place, "the same container is at another place, too")
                seen_containers.add(id(container))
            yield kept

    def _all_kept(self, is_kept: IsKept) -> Iterator[tuple[Kept, tuple[int, object]]]:
        """The same with the owner and the name of the attribute."""
        for noted in self._before.values():
            now = noted.now
            differences = _Differences(_never if noted.whole else is_kept)
            for name in {**noted.values, **now}:
                old, new = noted.values.get(name, ABSENT), now.get(name, ABSENT)
                for kept in differences.at(noted.place(name), old, noted.contents.get(name), new):
                    yield kept, (id(noted.owner), name)

        differences = _Differences(is_kept)
        for key, (place, old) in self._variables.items():
            for kept in differences.at(place, old, None, place.get()):
                yield kept, key

    def counted(self, *, of_modules: bool) -> Iterator[Kept]:
        """The plain numbers that are others now than before: counts, as of calls.

        Args:
            of_modules: Those in modules and in records, or those elsewhere.
        """
        for noted in self._before.values():
            if noted.whole != of_modules:
                continue
            now = noted.now
            for name in {**noted.values, **now}:
                # `calls = 0` may stand in the class, until `self.calls += 1` makes an attribute of it.
                old = noted.values.get(name, getattr(type(noted.owner), name, ABSENT))
                place = noted.place(name)
                contents: Any = noted.contents.get(name)
                if _is_counted(old, now.get(name)):
                    yield Kept(place, "set", old, now[name])
                elif contents is not None and isinstance(old, dict) and now.get(name) is old:
                    for key, same, _ in contents:
                        if _is_counted(same.value, old.get(key)):
                            yield Kept(place.within(key), "set", same.value, old[key])
        if of_modules:
            return
        for place, old in self._variables.values():
            new = place.get()
            if _is_counted(old, new):
                yield Kept(place, "set", old, new)

    def holding(self, value: object) -> Iterator[Place]:
        """The places that held this very object before."""
        for noted in self._before.values():
            for name, old in noted.values.items():
                contents: Any = noted.contents.get(name)
                if old is value:
                    yield noted.place(name)
                elif isinstance(old, dict) and contents is not None:
                    for key, same, _ in contents:
                        if same.value is value:
                            yield noted.place(name).within(key)
        for place, old in self._variables.values():
            if old is value:
                yield place

    def containers(self) -> set[int]:
        """The identities of the containers that were there before."""
        values: list[object] = []
        for noted in self._before.values():
            values += noted.values.values()
            for contents in noted.contents.values():
                values += _values_in(contents)
        values += [value for _, value in self._variables.values()]
        return {id(value) for value in values if type(value) in _CONTAINERS}

    def restore(self, *, is_whole: bool = False) -> list[Change]:
        """Put every attribute back, contents of containers too; return what had changed.

        Args:
            is_whole: Also plain values outside of modules.
        """
        changes: list[Change] = []
        for noted in self._before.values():
            changes += _restore(noted, self._done_again, is_whole)
        for key, (place, old) in self._variables.items():
            now = place.get()
            # A function was noted while another had replaced it, such as a patched `print`, which must not come back.
            is_put_back = is_whole and not callable(old)
            if now is not old and (is_put_back or key in self._done_again or has_late(now)):
                place.set(old)
        return changes


def _values_in(contents: Any) -> Iterator[object]:
    for _, same, inner in contents:
        yield same.value
        if inner is not None:
            yield from _values_in(inner)


def _restore(noted: _Noted, done_again: Set[tuple[int, object]], is_whole: bool) -> Iterator[Change]:
    now = noted.now
    for name in list({**noted.values, **now}):
        old, new, contents = noted.values.get(name, ABSENT), now.get(name, ABSENT), noted.contents.get(name)
        if old is new and (contents is None or contents_of(new) == contents):
            continue

        # What is not a module's is the user's own to change, unless something of the capture would stay in it.
        is_done_again = (is_whole and not callable(old)) or (id(noted.owner), name) in done_again
        is_left_alone = name in noted.skipped or not noted.whole
        if is_left_alone and not is_done_again and not _has_fake(new) and not has_late(new):
            continue

        left = _copy(new)
        if name in noted.skipped:
            _repair(new, contents)
        else:
            _put_back(now, name, old, contents)
        if has_late(left) or is_done_again:  # an effect, done again after each step
            continue
        path = f"{noted.path}.{name}" if noted.path else name
        old = old if contents is None else dict_of(contents)
        yield Change(path, now, name, old, left, type(noted.owner) not in _CONTAINERS)

    # Attributes have an order, in which `named_modules` and `repr` give them.
    if noted.whole and list(now) != list(noted.values):
        present = dict(now)
        now.clear()
        now.update(present | noted.values if noted.skipped else noted.values)


def _never(tensor: torch.Tensor) -> bool:
    return False


class _Differences:
    """What a function has done at places: numbers or tensors of the capture are in it, or plain values are in a list.

    Args:
        is_kept: Tells of a tensor of the capture whether it can be put there after each call.
    """

    def __init__(self, is_kept: IsKept) -> None:
        self._is_kept, self._only_plain = is_kept, False

    def at(self, place: Place, old: object, contents: Any, new: Any) -> Iterator[Kept]:
        """All that was done at a place, and in the containers there."""
        is_list = old is new and contents is not None and isinstance(new, (list, collections.deque))
        self._only_plain = not self._has_some(new)
        if not self._only_plain or is_list:
            yield from self._all(place, old, contents, new)

    def _has_some(self, value: object) -> bool:
        return any(is_late(leaf) or (_is_fake(leaf) and self._is_kept(leaf)) for leaf in _leaves(value))

    def _can_be_repeated(self, place: Place, value: object) -> bool:
        """Tell whether a value can be made again; one with a tensor alone that is not kept is only put back."""
        if self._only_plain and not is_plain(value, (type(None),)):
            return False  # another object at each call
        fakes = [leaf for leaf in _leaves(value) if _is_fake(leaf)]
        if all(map(self._is_kept, fakes)):
            return True
        if has_late(value):
            raise _cannot_be_repeated(place, "a tensor beside them")
        return False

    def _all(self, place: Place, old: object, contents: Any, new: Any) -> Iterator[Kept]:
        if new is not old:
            if self._can_be_repeated(place, new):
                yield Kept(place, "set", old, new)
        elif contents is not None and isinstance(new, dict):
            before = {key: (same.value, inner) for key, same, inner in contents}
            if not before.keys() <= new.keys():
                raise _cannot_be_repeated(place, "items are taken out there")
            for key, value in new.items():
                if has_late(key):
                    raise _cannot_be_repeated(place, "one of them is a key")
                value_before, inner = before.get(key, (ABSENT, None))
                yield from self._all(place.within(key), value_before, inner, value)
        elif contents is not None:
            yield from self._items(place, contents, new)

    def _items(self, place: Place, contents: Any, new: Any) -> Iterator[Kept]:
        """What was done to a list or a queue."""
        before, now = [same.value for _, same, _ in contents], list(new)
        # Of a queue that is full, the first items may have dropped out.
        if getattr(new, "maxlen", None) == len(now):
            num_dropped = 0
            while not _are_same(before[num_dropped:], now[: len(before) - num_dropped]):
                num_dropped += 1
            before, contents = before[num_dropped:], contents[num_dropped:]

        num_added, first = len(now) - len(before), 0
        added, action = list[Any](), "set"
        if is_watched(new) and new.is_emptied:
            added, action, contents = now, "refill", ()
        elif is_watched(new) and new.num_prepended:
            added, action, first = now[:num_added], "prepend", num_added
            if not _are_same(now[num_added:], before):
                raise _cannot_be_repeated(place, "items are added at both of its ends")
        elif num_added >= 0 and _are_same(now[: len(before)], before):
            added, action = now[len(before) :], "extend"
        elif num_added >= 0 and _are_same(now[num_added:], before):
            added, action, first = now[:num_added], "prepend", num_added
        elif num_added == 0:
            pass  # items are set, or all are taken out and others put in, which a watched list can tell
        elif not is_watched(new) and not any(item is other for item in now for other in before):
            added, action, contents = now, "refill", ()
        else:
            if has_late(now):
                raise _cannot_be_repeated(place, "items are taken out there")
            return

        if added and self._can_be_repeated(place, added):
            yield Kept(place, action, new, added)
        for index, (_, same, inner) in enumerate(contents):
            yield from self._all(place.within(index), same.value, inner, now[first + index])


def _are_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(a is b for a, b in zip(items, others, strict=True))


def _cannot_be_repeated(place: Place, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"The captured function keeps numbers of a step in {place.name}, and {why}. What is done again after each step "
        "is an append, an extend, an item or attribute that is set, and a sum. Do the rest after the step, or return "
        "the number in the metrics."
    )


def _is_counted(old: object, new: object) -> bool:
    return type(old) in (int, float) and type(new) in (int, float) and new != old


def contents_of(container: Any, depth: int = _DEPTH) -> tuple[tuple[object, Same, object], ...]:
    """Contents of a container and of those in it, by which a change is noticed and undone."""
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    contents: list[tuple[object, Same, object]] = []
    for key, value in pairs:
        is_deep = type(value) in _CONTAINERS and depth > 0
        contents.append((key, Same(value), contents_of(value, depth - 1) if is_deep else None))
    return tuple(contents)


def dict_of(contents: Any) -> dict[object, object]:
    """Contents by key."""
    return {key: same.value for key, same, _ in contents}


def _put_back(attributes: dict[str, object], name: str, old: object, contents: Any) -> None:
    if old is ABSENT:
        attributes.pop(name, None)
        return
    attributes[name] = old
    if contents is not None:
        _refill(old, contents)


def _refill(container: Any, contents: Any) -> None:
    for _, same, inner in contents:
        if inner is not None:
            _refill(same.value, inner)
    if contents_of(container) == contents:
        return

    # By the methods of Python's own class: those of a subclass may note, or refuse, that they are called.
    kinds: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)
    base: Any = next(kind for kind in kinds if isinstance(container, kind))
    base.clear(container)
    for key, same, _ in contents:
        if issubclass(base, dict):
            base.__setitem__(container, key, same.value)
        else:
            getattr(base, "add" if base is set else "append")(container, same.value)


def _repair(entries: Any, contents: Any) -> None:
    """Take tensors of a capture out of a module's parameters or buffers."""
    before = dict_of(contents)
    for key, value in list(entries.items()):
        if not _has_fake(value):
            continue
        if key in before:
            entries[key] = before[key]
        else:
            entries.pop(key)


@contextlib.contextmanager
def new_values(changes: Iterable[Change]) -> Iterator[None]:
    """Give attributes the values that a callable left, for a while."""
    changes = list(changes)
    before = [_swap(change.attributes, change.name, change.new) for change in changes]
    try:
        yield
    finally:
        for change, (old, contents) in zip(changes, before, strict=True):
            _put_back(change.attributes, change.name, old, contents)


def _swap(attributes: dict[str, object], name: str, new: object) -> tuple[object, object]:
    """Give an attribute another value, a container in place, which others may hold too; returns what was there."""
    old = attributes.get(name, ABSENT)
    if type(old) not in _CONTAINERS or type(new) is not type(old):
        _put_back(attributes, name, new, None)
        return old, None
    contents = contents_of(old)
    _refill(old, contents_of(new, 0))
    return old, contents


def _copy(value: Any) -> Any:
    """A container with copies of the containers in it; anything else as it is."""
    if type(value) not in _CONTAINERS:
        return value
    copied = value.copy()
    contents = [(key, Same(_copy(same.value)), None) for key, same, _ in contents_of(value, 0)]
    _refill(copied, tuple(contents))
    return copied


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What an inner function closes over, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents


def _items(value: Any) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[object]:
    """What is in a container, and in those in it; keys too."""
    if not _is_container(value) or depth < 0:
        yield value
        return
    for item in [*value, *_items(value)] if isinstance(value, dict) else value:
        yield from _leaves(item, depth - 1)


def _containers_in(value: Any) -> Iterator[object]:
    """A container with late numbers that can change, and those in it."""
    if not has_late(value):
        return
    if isinstance(value, (list, dict, collections.deque)):
        yield value
    if _is_container(value):
        for item in _items(value):
            yield from _containers_in(item)


def _is_container(value: object) -> bool:
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return is_named or type(value) in (*_CONTAINERS, tuple, torch.Size)


def has_late(value: object) -> bool:
    """Tell whether late numbers of a capture are in a value."""
    return any(is_late(leaf) for leaf in _leaves(value))


def _has_fake(value: object) -> bool:
    return any(map(_is_fake, _leaves(value)))


def _is_fake(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and hasattr(leaf, "fake_mode")


def is_plain(value: object, more: tuple[type, ...] = ()) -> bool:
    """Tell whether a value is a number, a string or a container of such, or of more types."""
    return all(isinstance(leaf, (*NUMBERS, *more)) for leaf in _leaves(value))


def is_record(value: object) -> bool:
    """Tell whether a value is a bundle of settings, to be looked into."""
    if isinstance(value, type):
        return False
    is_known = isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or dataclasses.is_dataclass(value)
    return (is_known or type(value).__name__.endswith("Config")) and hasattr(value, "__dict__")


def _is_of_user(value: object) -> bool:
    """Tell whether a value is of a class that neither Python nor the libraries below have brought."""
    below = (
        "builtins",
        "torch",
        "jax",
        "jaxlib",
        "numpy",
        "functools",
        "types",
        "logging",
        "threading",
        "_thread",
        "torch_shard",
    )
    return any(cls.__module__.split(".")[0] not in below for cls in type(value).__mro__)


def _slots_of(value: object) -> list[str]:
    names: list[str] = []
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                names.append(name)
    return names
