"""Plain attributes of modules: what a program depends on, and what forward does to them."""

import collections
import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

NUMBERS = (bool, int, float, str)

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)

_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)

_OF_TORCH = frozenset(vars(nn.Module())) - _HOOKS

_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Change:
    """An attribute that forward left with another value."""

    path: str
    attributes: dict[str, object]
    name: str
    old: object
    new: object


class SideEffects:
    """The attributes and hooks of modules as they were before a capture."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[str, nn.Module, dict[str, object], dict[str, object]]] = {}

    def note(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Remember the present attributes of modules, given with their names, unless that was done before."""
        for path, module in modules:
            if id(module) not in self._before:
                values = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
                contents = {n: _contents(v) for n, v in values.items() if type(v) in _CONTAINERS}
                self._before[id(module)] = (path, module, values, contents)

    def restore(self) -> list[Change]:
        """Put every attribute back, contents of containers too; return what had changed."""
        changes = []
        for path, module, values, contents in self._before.values():
            now = vars(module)
            for name in [n for n in {**values, **now} if n not in _OF_TORCH]:
                old, new = values.get(name, _ABSENT), now.get(name, _ABSENT)
                if old is new and (name not in contents or _contents(new) == contents[name]):
                    continue
                left = copy.copy(new) if type(new) in _CONTAINERS else new
                changes.append(Change(f"{path}.{name}" if path else name, now, name, old, left))
                _put_back(now, name, old, contents.get(name))
        return changes


class Contents:
    """Contents of containers, to be put back."""

    def __init__(self, values: Iterable[object]) -> None:
        self._before = {id(v): (v, _contents(v)) for v in values if type(v) in _CONTAINERS}

    def restore(self) -> None:
        """Put it back where it has changed."""
        for container, contents in self._before.values():
            if _contents(container) != contents:
                _refill(container, contents)


def _contents(container: Any) -> object:
    """Contents of a container, by which a change is noticed and undone."""
    return [(k, Same(v)) for k, v in container.items()] if isinstance(container, dict) else list(map(Same, container))


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
        del attributes[name]
        return
    attributes[name] = old
    if contents is not None:
        _refill(old, contents)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update((k, v.value) for k, v in contents)
    else:
        (container.update if isinstance(container, set) else container.extend)(v.value for v in contents)


@contextlib.contextmanager
def new_values(changes: Iterable[Change]) -> Iterator[None]:
    """Give attributes the values that forward left, for a while."""
    for change in changes:
        change.attributes[change.name] = change.new
    try:
        yield
    finally:
        for change in changes:
            _put_back(change.attributes, change.name, change.old, None)


def settle(changes: list[Change], was_read: Callable[[torch.Tensor], bool]) -> list[Change]:
    """Sort the attributes that a capture changed and that were put back: by what a compiled program makes of them.

    Args:
        changes: What forward did.
        was_read: Tells whether forward also read a tensor.

    Returns:
        The changed numbers, strings, containers of them and hooks: harmless only if the program does not depend on
        them.

    Raises:
        NotImplementedError: A tensor is carried from one call to the next in a plain attribute.
    """
    for change in changes:
        if not _has_tensor(change.new):
            continue
        if isinstance(change.old, torch.Tensor) and was_read(change.old):
            raise NotImplementedError(
                f"forward reads the plain attribute {change.path}, a tensor, and writes it: it carries a value from "
                "call to call, and a compiled program keeps such a value only in a buffer. Register it: "
                f"self.register_buffer({change.name!r}, tensor, persistent=False); forward stays as it is."
            )
        logger.warning(
            "forward writes the plain attribute %s; a compiled step does not keep such writes. Return the value in "
            "the metrics, or register a buffer.",
            change.path,
        )
    return [c for c in changes if c.name in _HOOKS or _is_plain(c.new)]


def _leaves(value: Any) -> list[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if type(value) in (*_CONTAINERS, tuple) else [value]


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))


def _is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string or a container of such."""
    return all(isinstance(leaf, NUMBERS) for leaf in _leaves(value))
