"""What a captured callable does to the objects that it reaches: noticed, and taken back to the bit."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

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
)

_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)

_OF_TORCH = frozenset(vars(nn.Module())) - _HOOKS

_LOOKED_AFTER = ("_flat_weights", "_flat_weight_refs")  # by torch.nn.RNNBase, which compares them in each forward

_ABSENT = object()

_DEPTH, _MOST = 4, 1000


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
    def matters(self) -> bool:
        """Tell whether the next call may be another program for it."""
        if self.name in _LOOKED_AFTER:
            return False
        return bool(self.tensors) or self.name in _HOOKS or is_plain(self.new)

    def after(self, num_calls: int, second: object) -> "Change":
        """The same after many calls, if it is of a number that the second call takes on by as much as the first."""
        old, new = 0 if self.old is _ABSENT else self.old, self.new
        if not all(type(value) in (int, float) for value in (old, new, second)):
            return self
        step: Any = new - old  # pyright: ignore[reportOperatorIssue]
        return dataclasses.replace(self, new=old + num_calls * step) if second == new + step else self

    def added(self) -> dict[str, object]:
        """What is new in a dict, such as that of a module's buffers."""
        if not isinstance(self.new, dict):
            return {}
        old = self.old if isinstance(self.old, dict) else {}
        return {key: value for key, value in self.new.items() if value is not None and old.get(key) is None}


@dataclasses.dataclass(frozen=True)
class _Noted:
    """Attributes of one object, as they were.

    Attributes:
        path: Its name.
        owner: The object, kept alive.
        values: Its attributes.
        contents: Of the containers among these.
        skipped: Attributes to be left alone, but for tensors of a capture in them.
        whole: Whether all changes are taken back, not only tensors that a capture has left.
    """

    path: str
    owner: object
    values: dict[str, object]
    contents: dict[str, object]
    skipped: tuple[str, ...]
    whole: bool


class SideEffects:
    """Attributes and hooks of modules, and of what hangs on them, as they were before a capture."""

    def __init__(self) -> None:
        self._before: dict[int, _Noted] = {}
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

    def note_value(self, name: str, value: object) -> None:
        """Remember the contents of something that a function reaches by a name."""
        if isinstance(value, nn.Module):
            self.note(value.named_modules(prefix=name), entries=True)
        elif type(value) in _CONTAINERS and id(value) not in self._before:
            held: dict[str, object] = {name: value}
            self._before[id(value)] = _Noted("", value, held, {name: contents_of(value)}, (), False)
        else:
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
        owners = ((noted.owner, noted.contents) for noted in self._before.values())
        return [
            buffer
            for module, contents in owners
            if isinstance(module, nn.Module) and "_buffers" in contents  # a script has them elsewhere, and no new ones
            for name, buffer in module._buffers.items()
            if buffer is not None and dict_of(contents["_buffers"]).get(name) is None
        ]

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
        contents: dict[str, object] = {n: contents_of(v) for n, v in values.items() if type(v) in _CONTAINERS}
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
            value = (*(value.__defaults__ or ()), value.__kwdefaults__ or {})
        elif isinstance(value, types.MethodType) and not isinstance(value.__self__, nn.Module):
            value = value.__self__
        if type(value) in (*_CONTAINERS, tuple):
            for item in _items(value)[:_MOST]:
                self._look_into(path, item, depth - 1)
        elif isinstance(value, nn.Module):
            self.note(value.named_modules(prefix=path), entries=False)
        elif is_record(value) or (_is_of_user(value) and hasattr(value, "__dict__")):
            self._note(path, value, (), depth)
        elif _is_of_user(value):
            for name, held in _slots_of(value).items():
                if type(held) in _CONTAINERS:
                    self.note_value(f"{path}.{name}", held)

    def restore(self) -> list[Change]:
        """Put every attribute back, contents of containers too; return what had changed."""
        return [change for noted in self._before.values() for change in _restore(noted)]


def _restore(noted: _Noted) -> Iterator[Change]:
    now = noted.values if type(noted.owner) in _CONTAINERS else vars(noted.owner)
    for name in list({**noted.values, **now}):
        old, new, contents = noted.values.get(name, _ABSENT), now.get(name, _ABSENT), noted.contents.get(name)
        same = old is new and (contents is None or contents_of(new) == contents)
        repaired = name in noted.skipped or not noted.whole
        if same or (repaired and not _has_fake(new)):
            continue
        left = _copy(new)
        if name in noted.skipped:
            _repair(new, contents)
        else:
            _put_back(now, name, old, contents)
        path = f"{noted.path}.{name}" if noted.path else name
        old = old if contents is None else dict_of(contents)
        yield Change(path, now, name, old, left, type(noted.owner) not in _CONTAINERS)
    if noted.whole and list(now) != list(noted.values):
        kept = dict(now)
        now.clear()
        now.update(kept | noted.values if noted.skipped else noted.values)


def refuse_new_parameters(changes: Iterable[Change]) -> None:
    """Refuse a callable that gives a module further parameters."""
    found = [
        f"{change.path.removesuffix(change.name)}{name}"
        for change in changes
        for name, value in change.added().items()
        if change.name == "_parameters"
        or (change.name == "_modules" and isinstance(value, nn.Module) and next(value.parameters(), None) is not None)
    ]
    if found:
        raise NotImplementedError(
            f"The function adds {', '.join(found)} to a module, with parameters that the state of a step would "
            "lack. Make them before: in __init__, or by one call of the model in eager torch."
        )


def contents_of(container: Any, depth: int = _DEPTH) -> tuple[tuple[object, "Same", object], ...]:
    """Contents of a container and of those in it, by which a change is noticed and undone."""
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    inner = [(key, value, type(value) in _CONTAINERS and depth > 0) for key, value in pairs]
    return tuple((key, Same(value), contents_of(value, depth - 1) if deep else None) for key, value, deep in inner)


def dict_of(contents: Any) -> dict[object, object]:
    """Contents by key."""
    return {key: same.value for key, same, _ in contents}


class Same:
    """Equal if it is the same object: tensors have no equality that is one truth."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _put_back(attributes: dict[str, object], name: str, old: object, contents: Any) -> None:
    if old is _ABSENT:
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
    kinds: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)
    base: Any = next(kind for kind in kinds if isinstance(container, kind))  # past what a subclass makes of writes
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
        if _has_fake(value):
            entries.pop(key) if key not in before else entries.__setitem__(key, before[key])


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
    old = attributes.get(name, _ABSENT)
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
    new = value.copy()
    _refill(new, tuple((key, Same(_copy(same.value)), None) for key, same, _ in contents_of(value, 0)))
    return new


def _items(value: Any) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[object]:
    """What is in a container, and in those in it; keys too."""
    if type(value) not in (*_CONTAINERS, tuple) or depth < 0:
        yield value
        return
    for item in [*value, *_items(value)] if isinstance(value, dict) else value:
        yield from _leaves(item, depth - 1)


def _has_fake(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) and hasattr(leaf, "fake_mode") for leaf in _leaves(value))


def is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string or a container of such."""
    return all(isinstance(leaf, NUMBERS) for leaf in _leaves(value))


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
    return type(value).__module__.split(".")[0] not in below


def _slots_of(value: object) -> dict[str, object]:
    members = ((name, member) for cls in type(value).__mro__ for name, member in vars(cls).items())
    names = [name for name, member in members if isinstance(member, types.MemberDescriptorType)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
