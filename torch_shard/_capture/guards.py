"""What a program was made for besides its inputs, and whether it still holds: the ways in which a program is outdated.

These are the training flags of modules (`ModuleFlags`), and values that are read from outside (`Guard`): those that the
user's own functions have read (`reads`), and the plain attributes of modules.

A guard is asked at every step. So it first compares identities, without a line of Python for each value; only where one
differs are the values walked again (`Walk`), to compare what they are.
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
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_shard._capture.provenance import is_own_file
from torch_shard._capture.side_effects import _OF_TORCH, ABSENT, NUMBERS, Place, is_plain, is_record

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
        value, its = self.value, other.value
        if value is its:
            return True
        # By their texts: 1 == 1.0 == True, and 0.0 == -0.0, though a program differs by them; nan != nan, though not.
        return type(value) is type(its) and isinstance(value, _PLAIN) and repr(value) == repr(its)

    def __hash__(self) -> int:
        return hash(type(self.value))


class Walk:
    """The values that are reached from roots."""

    def __init__(self, settings: Names | None, *, functions: bool, without: Iterable[Place] = ()) -> None:
        self._settings, self._functions = settings, functions

        # Places that are left out, and the containers that are compared but for such places.
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

        # What `holds` compares by identity: owner, key and value; containers, with all their items one after the other.
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
        (dicts, dict_keys, dict_values), (objects, names, attributes) = self._columns
        absent = itertools.repeat(ABSENT)
        # This runs before each step, over thousands of values: `map` of functions of C takes a tenth of a loop's time.
        try:
            if not all(map(operator.is_, map(dict.get, dicts, dict_keys, absent), dict_values)):
                return False
            if not all(map(operator.is_, map(getattr, objects, names, absent), attributes)):
                return False
            if any(self._empty) or list(map(len, self._iterables)) != self._lengths:
                return False
            if not all(map(operator.is_, itertools.chain.from_iterable(self._iterables), self._items)):
                return False
            return all(content is None or _bytes_of(array) == content for _, array, content in self.arrays)
        except (ValueError, RuntimeError):  # a cell that is empty now; a container that another thread changes
            return False

    @functools.cached_property
    def _columns(self) -> tuple[tuple[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any], list[Any]]]:
        """Owners, keys and values: those in dicts, and those in other objects."""
        in_dicts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        in_objects: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for slot in self._slots.values():
            columns = in_dicts if isinstance(slot[0], dict) else in_objects
            for column, part in zip(columns, slot, strict=True):
                column.append(part)
        return in_dicts, in_objects

    def _slot(self, owner: Any, key: Any, name: str, names: Names | None) -> None:
        """Note what is at a place, and follow it."""
        if (id(owner), key) in self._without:
            return

        value = owner.get(key, ABSENT) if isinstance(owner, dict) else attribute_of(owner, key, ABSENT)
        is_noted = self._functions or not isinstance(value, FUNCTIONS)
        if is_noted and (id(owner), key) not in self._slots:
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
            self._visit(name, value.func, names)
            self._visit(f"an argument of {name}", value.args, names)
            self._visit(f"an argument of {name}", value.keywords, names)
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__func__, names)
        elif isinstance(value, types.FunctionType):
            if is_own_file(value.__code__.co_filename):
                self._function(name, value, names)
        elif isinstance(value, types.ModuleType):
            if names is not None and _is_own(value):
                self._attributes(name, vars(value), sorted(names), names)
        elif names is not None or is_record(value) or _is_whole(value):
            self._object(name, value, names)

    def _function(self, name: str, function: types.FunctionType, names: Names | None) -> None:
        if self._functions:
            self._slot(function, "__code__", f"{name}()", names)
        for part in ("__defaults__", "__kwdefaults__"):
            self._slot(function, part, f"a default of {name}()", names)
        self._attributes(name, vars(function), sorted(names or ()), names)

    def _attributes(self, name: str, owner: dict[str, Any], which: Iterable[str], names: Names | None) -> None:
        for attribute in which:
            self._slot(owner, attribute, f"{name}.{attribute}" if name else attribute, names)

    def _object(self, name: str, value: Any, names: Names | None) -> None:
        """Follow the attributes of an object that are read."""
        attributes: dict[str, Any] = {} if isinstance(value, type) else instance_dict(value)

        # A library may read any of what is a bundle of settings. Of the user's own, names in code say which.
        is_whole = _is_whole(value)
        if is_whole or is_record(value):
            settings = None if names is None or is_whole else self._settings
            read = attributes.keys() if settings is None else attributes.keys() & settings
            self._attributes(name, attributes, sorted(read), names)
        if names is None:
            return

        followed = {*attributes}
        if isinstance(value, nn.Module) and isinstance(value._modules, dict):
            self._attributes(name, value._modules, sorted(names & value._modules.keys()), names)
            # Plain attributes of modules that run are compared anyway (`_module_roots`).
            of_torch = _OF_TORCH.union(HOOKS)
            followed = {key for key, inner in attributes.items() if key not in of_torch and _is_followed(inner)}
        self._attributes(name, attributes, sorted(names & followed), names)
        self._of_class(name, value, names)

    def _of_class(self, name: str, value: Any, names: Names) -> None:
        """Follow what is read of a class: data, slots, which functions its methods are; and what is not there yet."""
        cls = value if isinstance(value, type) else type(value)
        is_instance = value is not cls
        attributes = instance_dict(value)
        own_bases = list(itertools.takewhile(_is_own, cls.__mro__))
        for attribute in sorted(names):
            path = f"{name}.{attribute}"
            member = next((vars(base)[attribute] for base in own_bases if attribute in vars(base)), None)
            # It may come, for code with getattr(..., default) or hasattr.
            if member is None and not hasattr(cls, attribute):
                if is_instance and attribute not in attributes:
                    self._slot(attributes, attribute, path, names)
                if own_bases:
                    self._slot(cls, attribute, path, names)
            elif isinstance(member, types.MemberDescriptorType):  # of __slots__
                if is_instance:
                    self._slot(value, attribute, path, names)
            elif member is not None and not _is_descriptor(member):
                if is_instance:  # it may get one of its own
                    self._slot(attributes, attribute, path, names)
                self._slot(cls, attribute, path, names)

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

        is_set = isinstance(value, (set, frozenset))
        if is_set or isinstance(value, _DICTS):
            self.hashed += [(name, item) for item in value if isinstance(item, torch.Tensor)]

        # The keys of a dict, and its values.
        parts = (value, value.values()) if isinstance(value, _DICTS) and value else (value,)
        if len(self._items) + len(parts) * len(value) > MOST_ITEMS:
            self.too_large.append(f"{name} ({len(value):,} items)")
            self.values.append((name, (type(value), len(value))))
            return

        is_mutable = not isinstance(value, (tuple, frozenset))
        for part in parts:
            items = list(part)
            if is_mutable and not items:
                self._empty.append(part)
            elif is_mutable:
                self._iterables.append(part)
                self._items += items
                self._lengths.append(len(items))
            self.values.append((name, (type(value), len(items), not is_set)))

            are_plain = all(issubclass(kind, _PLAIN) for kind in set(map(type, items)))
            if are_plain and is_set:
                # Python orders a set of strings anew in each process, and by its history.
                items = sorted(items, key=lambda item: (str(type(item)), repr(item)))
            self.values += [(name, self._kind(item)) for item in items]
            if not are_plain:
                for item in items:
                    self._visit(name, item, names)

    def _collection_without(self, name: str, value: Any, names: Names | None) -> None:
        """Compare a container but for what is left out."""
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, _DICTS) else enumerate(value)
        compared = [(key, item) for key, item in pairs if (id(value), key) not in self._without]

        # Identities cannot be compared in part: let `holds` say no, so that it is walked each time.
        self._empty.append([None])
        self.values.append((name, (type(value), len(compared))))
        for key, item in compared:
            self.values.append((f"{name}[{key!r}]", self._kind(item)))
            self._visit(name, item, names)

    def _array(self, name: str, value: Any) -> None:
        """Compare the content of an array."""
        array = np.asarray(value)
        num_bytes = sum(len(content or b"") for _, _, content in self.arrays)
        if array.dtype.hasobject or array.nbytes + num_bytes > _MOST_BYTES:
            self.arrays.append((name, value, None))
            self.too_large.append(f"{name} (an array of {array.nbytes:,} bytes)")
            self.values.append((name, Leaf(value)))
            return

        content = _bytes_of(value)
        self.arrays.append((name, value, content))
        self.values.append((name, (type(value), array.shape, array.dtype.str, content)))


def _bytes_of(array: Any) -> bytes:
    return bytes(array) if isinstance(array, bytearray) else array.tobytes()


def first_difference(before: list[tuple[str, Hashable]], now: list[tuple[str, Hashable]]) -> str | None:
    """The name of the first value in which two walks differ."""
    names_before = {name for name, _ in before}
    for earlier, later in itertools.zip_longest(before, now):
        if earlier == later:
            continue
        # A value that was not there before is the difference itself; otherwise what stood here is.
        if earlier is None or (later is not None and later[0] not in names_before):
            return later[0]
        return earlier[0]
    return None


def _is_followed(value: object) -> bool:
    """Tell whether a value is more than itself, so that its contents are compared; or not there yet."""
    if value is None:
        return True
    if isinstance(value, (*_PLAIN, torch.Tensor, *FUNCTIONS, nn.Module)):
        return False
    has_items = isinstance(value, (np.ndarray, functools.partial)) or _is_collection(value)
    return has_items or hasattr(value, "__dict__")


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


def _is_descriptor(member: object) -> bool:
    return hasattr(type(member), "__get__") and not isinstance(member, FUNCTIONS)


def instance_dict(value: object) -> dict[str, Any]:
    """The attributes that an object has of its own; a class has a `mappingproxy`, which is not meant."""
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def attribute_of(owner: object, name: str, default: object = None) -> Any:
    """An attribute; None of a cell of a function that nothing has been assigned to."""
    try:
        return getattr(owner, name, default)
    except ValueError:  # a cell that is not assigned yet
        return None


def _is_own(value: object) -> bool:
    """Tell whether a Python module or a class is in a file of the user's own."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", ""))
    file = getattr(module, "__file__", None)
    return module is not None and (module.__name__ == "__main__" or (file is not None and is_own_file(file)))


class Guard:
    """Values that were read from outside, by the roots from which they are reached.

    Args:
        roots: Of what was read.
        settings: As of `Walk`.
        without: Places that a program does not depend on: it writes to them after each call.
    """

    def __init__(self, roots: Iterable[Root], settings: Names | None = None, without: Iterable[Place] = ()) -> None:
        self._roots, self._settings, self._without = list(roots), settings, tuple(without)
        self._walk = self._walked()

    @classmethod
    def of_modules(
        cls, modules: Iterable[tuple[str, nn.Module]], own: nn.Module | None = None, without: Iterable[Place] = ()
    ) -> "Guard":
        """A guard of the plain attributes, functions and tensors of modules, their submodules and hooks.

        Args:
            modules: With their paths.
            own: A model whose parameters and buffers are inputs of the program.
            without: As of `Guard`.
        """
        return cls(_module_roots(modules, own or nn.Module()), without=without)

    def _walked(self) -> Walk:
        walk = Walk(self._settings, functions=True, without=self._without)
        for root in self._roots:
            walk.root(root)
        return walk

    @property
    def too_large(self) -> tuple[str, ...]:
        """Names, with their sizes, of what is too large to be compared at each step."""
        return tuple(self._walk.too_large)

    def changed(self) -> str | None:
        """The name of a value that is another one now."""
        if self._walk.holds():
            return None
        now = self._walked()
        name = first_difference(self._walk.values, now.values)
        if name is None:
            # Other objects with the same values: from now on, these are compared by identity.
            self._walk = now
        return name

    def renew(self) -> None:
        """Take the present values for those that were read."""
        self._walk = self._walked()

    def difference(self, other: "Guard") -> str | None:
        """The name of the first value that is another one for another guard."""
        return first_difference(self._walk.values, other._walk.values)

    def names(self, name: str) -> bool:
        """Tell whether code of the user's own reads a global of this name."""
        return any(root.name == name for root in self._roots)

    @property
    def leaves(self) -> Iterator[tuple[str, object]]:
        """What is compared as a whole, with its name: numbers, strings, tensors and other objects."""
        return ((name, leaf.value) for name, leaf in self._walk.values if isinstance(leaf, Leaf))

    @property
    def hashed(self) -> list[tuple[str, object]]:
        """As of `Walk`."""
        return self._walk.hashed

    @property
    def arrays(self) -> list[tuple[str, np.ndarray]]:
        """NumPy arrays, with their names."""
        return [(name, array) for name, array, _ in self._walk.arrays if isinstance(array, np.ndarray)]

    @property
    def frozen(self) -> tuple[str, ...]:
        """The numbers and strings: a program keeps them until they change."""
        numbers = (f"{name} = {value!r}" for name, value in self.leaves if isinstance(value, NUMBERS))
        return tuple(dict.fromkeys(numbers))


def metric_kinds() -> tuple[type, ...]:
    """The classes whose instances gather values over calls."""
    torchmetrics = sys.modules.get("torchmetrics")
    kinds = [getattr(torchmetrics, name, None) for name in ("Metric", "MetricCollection")]
    return tuple(kind for kind in kinds if isinstance(kind, type))


def _module_roots(modules: Iterable[tuple[str, nn.Module]], own: nn.Module) -> Iterator[Root]:
    """The plain attributes, functions and tensors of modules, their submodules and hooks."""
    inputs = set(map(id, own.modules()))
    for path, module in modules:
        if isinstance(module, metric_kinds()):  # an effect: its values are others after each step
            continue
        attributes = vars(module)
        prefix = f"{path}." if path else ""
        yield Root(f"{prefix}forward", attributes, "forward", None)
        yield Root(f"{type(module).__name__}.forward", type(module), "forward", None)

        # These dicts are never assigned anew, so that they are roots themselves. A scripted module has them elsewhere.
        tensors = () if id(module) in inputs else ("_parameters", "_buffers")
        for name in ("_modules", *HOOKS, *tensors):
            entries = attributes.get(name)
            if isinstance(entries, dict):
                yield Root(f"{prefix}{name}", None, entries, None)

        for name, value in attributes.items():
            is_of_torch = name in _OF_TORCH or "_hooks" in name or name == "forward"
            if not is_of_torch and value is not None and _is_setting(value):
                yield Root(f"{prefix}{name}", attributes, name, None)


def _is_setting(value: object) -> bool:
    kinds = (torch.Tensor, np.ndarray, types.BuiltinFunctionType, *FUNCTIONS)
    return isinstance(value, kinds) or is_plain(value) or is_record(value)


def read_by(fn: types.FunctionType) -> tuple[Hashable, ...]:
    """Now, the plain values that a function reads from outside, also as attributes of what it names."""
    names = frozenset(fn.__code__.co_names)
    walk = Walk(None, functions=False)
    walk.root(Root(fn.__name__, None, fn, names))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        walk.root(Root(name, cell, "cell_contents", names))
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            walk.root(Root(name, fn.__globals__, name, names))
    return tuple(walk.values)


class ModuleFlags(tuple[tuple[weakref.ref[nn.Module], bool], ...]):
    """Modules that ran, with the training flags that they had."""

    __slots__ = ()

    def hold(self) -> bool:
        """Tell whether every module still has its flag; one that is gone cannot have changed it."""
        for ref, flag in self:
            module = ref()
            if module is not None and module.training != flag:
                return False
        return True
