"""The values that are reached from roots, and whether they are still the same.

This is asked at every step. So a walk first compares identities, without a line of Python for each value; only where
one differs is it walked again, to compare what the values are.
"""

import array
import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
import types
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_shard._capture.provenance import is_own_file
from torch_shard._capture.side_effects import _OF_TORCH, ABSENT, Place, is_record

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, np.generic),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, types.BuiltinFunctionType),
)

_ARRAYS = (np.ndarray, array.array, bytearray)

_DICTS = (dict, types.MappingProxyType)

_COLLECTIONS = (*_DICTS, list, tuple, set, frozenset, collections.deque)

_WAYS_IN = frozenset(
    way
    for kind in (*_COLLECTIONS, collections.OrderedDict, collections.defaultdict, collections.Counter)
    for way in (kind.__iter__, kind.__len__)
)

FUNCTIONS = (types.FunctionType, types.MethodType)

MOST_ITEMS = 100_000
"""Items of containers that are compared before each step: a millisecond."""

_MOST_BYTES = 1 << 20
"""Of NumPy arrays."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Names = frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """A value from which reading began.

    Attributes:
        name: For messages.
        owner: What holds it: a dict, or an object with attributes. None for an object that is known by itself.
        key: Its key there; the object itself without an owner.
        names: Attributes that are read from it, and from what these hold. None for all of what is plain.
    """

    name: str
    owner: Any
    key: Any
    names: Names | None


class Leaf:
    """Equal to one of the same object, or of an equal plain value."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Leaf):
            return False
        mine, its = self.value, other.value
        return mine is its or (type(mine) is type(its) and isinstance(mine, _PLAIN) and repr(mine) == repr(its))

    def __hash__(self) -> int:
        return hash(type(self.value))


class Walk:
    """The values that are reached from roots."""

    def __init__(self, settings: Names | None, *, functions: bool, without: Iterable[Place] = ()) -> None:
        self._settings, self._functions = settings, functions
        self._without = set[tuple[int, Any]]()
        for place in without:
            with contextlib.suppress(LookupError, ValueError):  # what holds the value is not there now
                self._without.add((id(place.holder()), place.keys[-1]))
        self._partly = {holder for holder, _ in self._without}
        self.values: list[tuple[str, Hashable]] = []
        """Name and value, in the order in which they were met: equal in walks that have met the same."""
        self.too_large: list[str] = []
        self.hashed: list[tuple[str, object]] = []
        """Tensors that are elements of sets or keys of dicts, with the names of these."""
        self._seen: dict[tuple[int, Names | None], object] = {}
        self._slots: dict[tuple[int, Any], tuple[Any, Any, object]] = {}
        self._empty: list[Any] = []
        self._iterables: list[Any] = []
        self._items: list[object] = []
        self._lengths: list[int] = []
        self.arrays: list[tuple[str, Any, bytes | None]] = []
        """Arrays with their names, and their contents; without, if they are too large."""

    def root(self, root: Root) -> None:
        """Follow what is read from a root."""
        if root.owner is None:
            self._visit(root.name, root.key, root.names)
        else:
            self._slot(root.owner, root.key, root.name, root.names)

    def holds(self) -> bool:
        """Tell whether all that was met is still the same object, with the same objects in it."""
        in_dicts, in_objects = self._columns
        try:
            return (
                all(map(operator.is_, map(dict.get, *in_dicts[:2], itertools.repeat(ABSENT)), in_dicts[2]))
                and all(map(operator.is_, map(getattr, *in_objects[:2], itertools.repeat(ABSENT)), in_objects[2]))
                and not any(self._empty)
                and list(map(len, self._iterables)) == self._lengths
                and all(map(operator.is_, itertools.chain.from_iterable(self._iterables), self._items))
                and all(content is None or _bytes_of(held) == content for _, held, content in self.arrays)
            )
        except (ValueError, RuntimeError):  # a cell that is empty now; a container that another thread changes
            return False

    @functools.cached_property
    def _columns(self) -> Any:
        slots = list(self._slots.values())
        groups = ([s for s in slots if isinstance(s[0], dict) is kind] for kind in (True, False))
        return tuple([[*column] for column in zip(*group, strict=True)] or [[], [], []] for group in groups)

    def _slot(self, owner: Any, key: Any, name: str, names: Names | None) -> None:
        """Note what is found at a place, and follow it."""
        if (id(owner), key) in self._without:
            return
        value = owner.get(key, ABSENT) if isinstance(owner, dict) else attribute_of(owner, key, ABSENT)
        noted = self._functions or not isinstance(value, FUNCTIONS)
        if noted and (id(owner), key) not in self._slots:
            self._slots[id(owner), key] = owner, key, value
            self.values.append((name, self._kind(value)))
        self._visit(name, value, names)

    def _visit(self, name: str, value: Any, names: Names | None) -> None:
        """Follow a value that is reached."""
        if value is ABSENT or isinstance(value, (*_PLAIN, torch.Tensor)) or (id(value), names) in self._seen:
            return
        self._seen[id(value), names] = value
        if isinstance(value, _ARRAYS):
            self._array(name, value)
        elif _is_collection(value):
            self._collection(name, value, names)
            if hasattr(value, "__dict__"):  # of a subclass, such as a dict that is read by attributes
                self._object(name, value, names)
        elif isinstance(value, functools.partial):
            for part, held in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._visit(f"an argument of {name}" if part != "func" else name, held, names)
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__func__, names)
        elif isinstance(value, types.FunctionType):
            if is_own_file(value.__code__.co_filename):
                if self._functions:
                    self._slot(value, "__code__", f"{name}()", names)
                for part in ("__defaults__", "__kwdefaults__"):
                    self._slot(value, part, f"a default of {name}()", names)
                self._attributes(name, vars(value), sorted(names or ()), names)
        elif isinstance(value, types.ModuleType):
            if names is not None and _is_own(value):
                self._attributes(name, vars(value), sorted(names), names)
        elif names is not None or is_record(value) or _is_whole(value):
            self._object(name, value, names)

    def _attributes(self, name: str, held: dict[str, Any], which: Iterable[str], names: Names | None) -> None:
        for attribute in which:
            self._slot(held, attribute, f"{name}.{attribute}" if name else attribute, names)

    def _object(self, name: str, value: Any, names: Names | None) -> None:
        """Follow the attributes of an object that are read."""
        held: dict[str, Any] = {} if isinstance(value, type) else instance_dict(value)
        if is_record(value) or _is_whole(value):
            settings = None if names is None or _is_whole(value) else self._settings
            read = held.keys() if settings is None else held.keys() & settings
            self._attributes(name, held, sorted(read), names)
        if names is None:
            return
        names_held = {*held}
        if isinstance(value, nn.Module) and isinstance(value._modules, dict):
            self._attributes(name, value._modules, sorted(names & value._modules.keys()), names)
            plain = _OF_TORCH.union(HOOKS)
            names_held = {key for key, inner in held.items() if key not in plain and _is_followed(inner)}
        self._attributes(name, held, sorted(names & names_held), names)
        self._of_class(name, value, names)

    def _of_class(self, name: str, value: Any, names: Names) -> None:
        """Follow what is read of a class: data, slots, which functions its methods are; and what is not there yet."""
        cls, held = value if isinstance(value, type) else type(value), instance_dict(value)
        own = list(itertools.takewhile(_is_own, cls.__mro__))
        for attribute in sorted(names):
            found = next((vars(base)[attribute] for base in own if attribute in vars(base)), None)
            if found is None and not hasattr(cls, attribute):  # it may come: getattr(..., default), hasattr
                if value is not cls and attribute not in held:
                    self._slot(held, attribute, f"{name}.{attribute}", names)
                if own:
                    self._slot(cls, attribute, f"{name}.{attribute}", names)
            elif isinstance(found, types.MemberDescriptorType):
                if value is not cls:
                    self._slot(value, attribute, f"{name}.{attribute}", names)
            elif found is not None and not _is_descriptor(found):
                if value is not cls:  # an instance may get one of its own
                    self._slot(held, attribute, f"{name}.{attribute}", names)
                self._slot(cls, attribute, f"{name}.{attribute}", names)

    def _kind(self, value: object) -> Hashable:
        """What is compared of a value before it is followed."""
        if id(value) in self._partly:
            return (type(value),)
        return _kind(value) or Leaf(value)

    def _collection(self, name: str, value: Any, names: Names | None) -> None:
        """Compare the items of a container, and follow them."""
        if id(value) in self._partly:
            self._collection_without(name, value, names)
            return
        parts = (value, value.values()) if isinstance(value, _DICTS) and value else (value,)
        mutable = not isinstance(value, (tuple, frozenset))
        if isinstance(value, (*_DICTS, set, frozenset)):
            self.hashed += [(name, item) for item in value if isinstance(item, torch.Tensor)]
        if len(self._items) + len(parts) * len(value) > MOST_ITEMS:
            self.too_large.append(f"{name} ({len(value):,} items)")
            self.values.append((name, (type(value), len(value))))
            return
        for part in parts:
            items = list(part)
            if mutable and not items:
                self._empty.append(part)
            elif mutable:
                self._iterables.append(part)
                self._items += items
                self._lengths.append(len(items))
            in_order = not isinstance(value, (set, frozenset))
            self.values.append((name, (type(value), len(items), in_order)))
            kinds = set(map(type, items))
            plain = all(issubclass(kind, _PLAIN) for kind in kinds)
            if plain and not in_order:
                items = sorted(items, key=lambda item: (str(type(item)), repr(item)))
            self.values += [(name, self._kind(item)) for item in items]
            if not plain:
                for item in items:
                    self._visit(name, item, names)

    def _collection_without(self, name: str, value: Any, names: Names | None) -> None:
        """Compare a container but for what is left out."""
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, _DICTS) else enumerate(value)
        kept = [(key, item) for key, item in pairs if (id(value), key) not in self._without]
        self._empty.append([None])  # it is compared by walking
        self.values.append((name, (type(value), len(kept))))
        for key, item in kept:
            self.values.append((f"{name}[{key!r}]", self._kind(item)))
            self._visit(name, item, names)

    def _array(self, name: str, value: Any) -> None:
        """Compare the content of an array."""
        found = np.asarray(value)
        num_bytes = sum(len(content or b"") for _, _, content in self.arrays)
        if found.dtype.hasobject or found.nbytes + num_bytes > _MOST_BYTES:
            self.arrays.append((name, value, None))
            self.too_large.append(f"{name} (an array of {found.nbytes:,} bytes)")
            self.values.append((name, Leaf(value)))
            return
        content = _bytes_of(value)
        self.arrays.append((name, value, content))
        self.values.append((name, (type(value), found.shape, found.dtype.str, content)))


def _bytes_of(held: Any) -> bytes:
    return bytes(held) if isinstance(held, bytearray) else held.tobytes()


def first_difference(before: list[tuple[str, Hashable]], now: list[tuple[str, Hashable]]) -> str | None:
    """The name of the first value in which two walks differ."""
    known = {name for name, _ in before}
    for then, found in itertools.zip_longest(before, now):
        if then != found:
            return found[0] if then is None or (found is not None and found[0] not in known) else then[0]
    return None


def _is_followed(value: object) -> bool:
    """Tell whether a value is more than itself, so that its contents are compared; or not there yet."""
    plain = (*_PLAIN, torch.Tensor, *FUNCTIONS, nn.Module)
    return value is None or (
        not isinstance(value, plain)
        and (isinstance(value, (np.ndarray, functools.partial)) or _is_collection(value) or hasattr(value, "__dict__"))
    )


def _kind(value: object) -> Hashable:
    """What stands for a value whose contents are compared: not the object, which may be replaced by an equal one."""
    if isinstance(value, np.ndarray):
        return np.ndarray, value.shape
    if _is_collection(value) and not isinstance(value, torch.Size):
        return type(value), len(value)  # pyright: ignore[reportArgumentType]
    if is_record(value):
        return (type(value),)
    return None


def _is_collection(value: object) -> bool:
    """Tell whether a value is a container of Python, or of a class that is read like one."""
    kind: Any = type(value)
    return isinstance(value, _COLLECTIONS) and kind.__iter__ in _WAYS_IN and kind.__len__ in _WAYS_IN


def _is_whole(value: object) -> bool:
    """Tell whether the code of a library reads a value, so that all of it is compared.

    It is a container that is none of Python's own, as settings are, or an object of torch that is made of settings.
    """
    is_container = isinstance(value, (Mapping, Sequence, Set)) and not isinstance(value, _COLLECTIONS)
    return is_container or type(value).__module__.startswith(("torch.distributions.", "torch.optim.lr_scheduler"))


def _is_descriptor(found: object) -> bool:
    return hasattr(type(found), "__get__") and not isinstance(found, FUNCTIONS)


def instance_dict(value: object) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def attribute_of(owner: object, name: str, default: object = None) -> Any:
    try:
        return getattr(owner, name, default)
    except ValueError:  # a cell that is not assigned yet
        return None


def _is_own(value: object) -> bool:
    """Tell whether a Python module or a class is in a file of the user's own."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", ""))
    file = getattr(module, "__file__", None)
    return module is not None and (module.__name__ == "__main__" or (file is not None and is_own_file(file)))
