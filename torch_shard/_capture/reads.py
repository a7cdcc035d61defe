"""What the user's own functions read from outside while a capture runs: the roots of a guard.

Each function of the user's own that runs is seen (`CallWatcher`). Its code says which globals, closures and attributes
it reads; its arguments, and what functions return to it, are the objects that it reads them from. Code that knows
tensors of a model by identity is refused: within a capture, others are in their places.
"""

import builtins
import contextlib
import dataclasses
import dis
import functools
import gc
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from torch_shard._capture.checks import asks_for_types
from torch_shard._capture.data_dependence import current_values
from torch_shard._capture.function_mode import CaptureMode, outermost_mode
from torch_shard._capture.guards import Guard, Names, Root, attribute_of
from torch_shard._capture.late_numbers import is_late_number
from torch_shard._capture.provenance import CallWatcher, count_as_own, describe, is_own_file, is_user_file
from torch_shard._capture.side_effects import Place, is_record

_GETS_ANY = frozenset({"getattr", "hasattr", "vars", "__dict__", "asdict", "astuple", "fields", "attrgetter"})

_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

_CONSTRUCTORS = ("__init__", "__post_init__")


@dataclasses.dataclass(frozen=True)
class _Named:
    """What a code object names, and those within it.

    Attributes:
        globals: Global names that it reads.
        attributes: Attributes that it reads.
        modules: Python modules that it imports as it runs.
        assigned: Global names that it assigns to.
    """

    globals: Names
    attributes: Names
    modules: Names
    assigned: Names


@functools.lru_cache(maxsize=4096)
def _named(code: CodeType) -> _Named:
    assigned = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    read = [i for i in dis.get_instructions(code) if not i.opname.startswith(("STORE_", "DELETE_"))]
    globals_ = {i.argval for i in read if i.opname in _OF_GLOBALS}
    names = {i.argval for i in read if i.opcode in dis.hasname and i.opname not in _OF_GLOBALS}
    modules = {i.argval for i in read if i.opname == "IMPORT_NAME"}
    if not _GETS_ANY.isdisjoint(names | globals_):
        names |= _words(code.co_consts)
    globals_ |= _words(code.co_consts) if "globals" in globals_ else set()
    inner = [_named(const) for const in code.co_consts if isinstance(const, CodeType)]
    return _Named(
        frozenset(globals_).union(*(found.globals for found in inner)),
        frozenset(names).union(*(found.attributes for found in inner)),
        frozenset(modules).union(*(found.modules for found in inner)),
        frozenset(assigned).union(*(found.assigned for found in inner)),
    )


def _words(consts: tuple[object, ...]) -> set[str]:
    """The names among constants, by which attributes are got."""
    inner = [_words(const) for const in consts if isinstance(const, tuple)]
    return {const for const in consts if isinstance(const, str) and const.isidentifier()}.union(*inner)


class Reads:
    """What is read from outside while functions run within `seen`."""

    def __init__(self, loss_fn: Any, *, restore: bool) -> None:
        count_as_own(getattr(loss_fn, "__module__", None))
        self._roots: dict[object, Root] = {}
        self._settings: set[str] = set()
        self._any = False
        self._own: dict[int, _Named] = {}
        self._within: set[int] = set()
        self._made: dict[int, object] = {}
        self._closures: set[tuple[int, ...]] = set()
        self._assigned: list[tuple[str, dict[str, Any]]] = []
        self._compared: dict[str, frozenset[str]] = {}
        self._restore = restore
        self._mode: CaptureMode | None = None
        self._watcher = CallWatcher(self._wants, self._enter, self._leave)
        self._note(("loss",), Root(getattr(loss_fn, "__name__", type(loss_fn).__name__), None, loss_fn, frozenset()))

    def seen(self) -> contextlib.AbstractContextManager[None]:
        """See what captures within run, in this thread."""
        return self._watcher.watching()

    def guard(self, without: Iterable[Place] = ()) -> Guard:
        """A guard of all that was read, as it is now, but for these places."""
        return Guard(self._roots.values(), None if self._any else frozenset(self._settings), without)

    def refuse_identity(self, guard: Guard, entries: Mapping[str, torch.Tensor], what: str) -> None:
        """Refuse code that asks which of a model's tensors one is, by `id`, `is`, or as a key or an element."""
        names = {id(tensor): name for name, tensor in entries.items()}
        found: dict[str, dict[str, None]] = {}

        def line_of(variable: str) -> str | None:
            last = variable.rpartition(".")[2]
            return next((line for line, compared in self._compared.items() if last in compared), None)

        for variable, value in guard.hashed:
            if id(value) in names:
                found.setdefault(f"{variable} has as keys or elements", {})[names[id(value)]] = None
        for variable, value in guard.leaves:
            if type(value) is int and value in names:
                found.setdefault(f"{variable} has the id() of", {})[names[value]] = None
            elif id(value) in names and (line := line_of(variable)):
                found.setdefault(f"{line}\n  compares by identity, and {variable} has", {})[names[id(value)]] = None
        if found:
            listed = "\n".join(f"  {about} {_few(of)}" for about, of in found.items())
            raise NotImplementedError(
                f"{what} looks for tensors of the model by identity:\n\n{listed}\n\nIn a program others are in their "
                "places, so that none would be found. Compare names (`for name, p in model.named_parameters()`), or "
                "put a flag on the module that has the tensor."
            )

    def _wants(self, code: CodeType) -> bool:
        """Tell whether code is the user's own; of other code above PyTorch, only names matter."""
        file = code.co_filename
        own = is_own_file(file)
        if own or is_user_file(file):
            self._settings.update(code.co_names)
            self._settings |= _words(code.co_consts) if not _GETS_ANY.isdisjoint(code.co_names) else set()
            self._any = self._any or not _GETS_ANY.isdisjoint(code.co_names)
        if own:
            self._own[id(code)] = _named(code)
            self._within.update(map(id, codes_in(code)))
        return own

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        if self._restore and (mode := outermost_mode()) is not self._mode:  # the next capture
            self._mode = mode
            for root in self._roots.values():
                self._note_held(root)
            for name, variables in self._assigned:
                self._note_assigned(name, variables)
        if code.co_name in _CONSTRUCTORS and code.co_argcount:
            made = frame.f_locals.get(code.co_varnames[0])
            self._made[id(made)] = made
        if code.co_filename.startswith("<") and not _is_typed(frame):
            return
        named = self._own[id(code)]
        names = named.attributes
        if (id(code),) not in self._closures:
            self._closures.add((id(code),))
            if (line := compared_line(code, frame.f_globals)) is not None:
                self._compared[line] = self._compared.get(line, frozenset()) | named_in(code)
            for name in sorted(named.globals):  # also what is not there yet
                self._note((id(frame.f_globals), name, names), Root(name, frame.f_globals, name, names))
            for name in sorted(named.assigned - named.globals):
                self._assigned.append((name, frame.f_globals))
                self._note_assigned(name, frame.f_globals)
            for name in sorted(named.modules):
                if (module := sys.modules.get(name)) is not None:
                    self._note((id(module), names), Root(name, None, module, names))
        given = frame.f_locals
        if code.co_freevars and id(code) not in self._within:
            self._closure(code, {name: given[name] for name in code.co_freevars if name in given}, frame)
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
        for number, name in enumerate(code.co_varnames[:count]):
            value = given.get(name)
            _refuse_types(code, value)
            if value is not None:
                name = type(value).__name__ if number == 0 and name == "self" else name
                self._object(name, value, names)

    def _leave(self, frame: FrameType, value: object) -> None:
        if frame.f_code.co_name == "__new__":
            self._made[id(value)] = value
        caller = None if frame.f_back is None else self._own.get(id(frame.f_back.f_code))
        if caller is not None and frame.f_back is not None:
            _refuse_types(frame.f_back.f_code, value)
        if caller is not None and value is not None:
            self._object(f"{frame.f_code.co_name}()", value, caller.attributes)

    def _object(self, name: str, value: Any, names: Names, depth: int = 1) -> None:
        """Note an object that a function is given, or what a container of such has in it."""
        if isinstance(value, (str, bytes, int, float, torch.Tensor)):
            return
        if isinstance(value, (tuple, list, dict)) and not is_record(value):
            base: Any = next(kind for kind in (tuple, list, dict) if isinstance(value, kind))
            items: Any = dict.values if base is dict else base.__iter__  # past what a class makes of being read
            for item in items(value) if depth else ():
                self._object(name, item, names, depth - 1)
            return
        key = id(value), names
        if key in self._roots or id(value) in self._made or not hasattr(value, "__dict__"):
            return
        held = vars(value).values()
        if not isinstance(value, nn.Module) and any(
            isinstance(h, torch.Tensor) and hasattr(h, "fake_mode") for h in held
        ):
            return  # it was made within
        self._note(key, Root(name, None, value, names))

    def _closure(self, code: CodeType, values: dict[str, object], frame: FrameType) -> None:
        """Note the cells of a function that closes over variables."""
        key = (id(code), *map(id, values.values()))
        if key in self._closures:
            return
        self._closures.add(key)
        function = _function_of(code, values, frame)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True) if function else ()
        names = self._own[id(code)].attributes
        for name, cell in cells:
            if name != "__class__":
                self._note((id(cell), names), Root(name, cell, "cell_contents", names))

    def _note(self, key: object, root: Root) -> None:
        if key not in self._roots:
            self._roots[key] = root
            self._note_held(root)

    def _note_assigned(self, name: str, variables: dict[str, Any]) -> None:
        """Let the capture take back what it leaves in a global that the code only assigns to."""
        if self._mode is not None:
            self._mode.side_effects.note_variable(name, variables, name)

    def _note_held(self, root: Root) -> None:
        """Let the capture take back what it leaves in a global, in a variable or in an object."""
        if self._mode is None:
            return
        if root.owner is not None:
            self._mode.side_effects.note_variable(root.name, root.owner, root.key)
        elif not isinstance(root.key, nn.Module):  # which holds fakes now that are not its own
            self._mode.side_effects.note_value(root.name, root.key)


def _refuse_types(code: CodeType, value: object) -> None:
    """Refuse a number of the step that is given to code which asks for types: it is of another class than in torch."""
    if is_late_number(value) and asks_for_types(code) and not current_values().refused:
        current_values().refused = (
            f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\nThis function is given a '
            "number of the step, which is not known yet, and asks for the type of a value, or compares with `is True`. "
            "Use isinstance(value, float), or ask outside of what is captured."
        )


def _is_typed(frame: FrameType) -> bool:
    """Tell whether code without a file is the user's own: `dataclasses` makes some for every library."""
    file = getattr(sys.modules.get(frame.f_globals.get("__name__", "")), "__file__", None)
    return file is None or is_own_file(file)


def _function_of(code: CodeType, values: dict[str, object], frame: FrameType) -> types.FunctionType | None:
    """The function of a frame that has just begun."""

    def fits(found: object) -> bool:
        if not isinstance(found, types.FunctionType) or found.__code__ is not code:
            return False
        return all(
            attribute_of(cell, "cell_contents") is values.get(name)
            for name, cell in zip(code.co_freevars, found.__closure__ or (), strict=True)
        )

    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    likely = [frame.f_globals.get(code.co_name)]
    likely += [vars(cls).get(code.co_name) for cls in type(first).__mro__]
    found = next(filter(fits, likely), None)
    return found or next(filter(fits, gc.get_referrers(code)), None)  # pyright: ignore[reportReturnType]


_MAY_BE_TENSORS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "BINARY_SUBSCR", "BINARY_OP")


def _few(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:8]) + ", ..." * (len(shown) > 8)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code objects within one."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from codes_in(const)


@functools.lru_cache(maxsize=4096)
def named_in(code: CodeType) -> frozenset[str]:
    """All that code names from outside, and what is within it."""
    return frozenset(name for part in (code, *codes_in(code)) for name in (*part.co_names, *part.co_freevars))


def compared_line(code: CodeType, variables: dict[str, Any]) -> str | None:
    """The first line with an `is`, or an `id`, of what may be a tensor."""
    for part in (code, *codes_in(code)):
        before: list[dis.Instruction] = []
        for found in dis.get_instructions(part):
            is_asked = found.opname == "LOAD_GLOBAL" and found.argval == "id" and "id" not in variables
            is_asked |= found.opcode in dis.hasname and found.argval in ("is_", "is_not")  # of the module operator
            if is_asked or (found.opname == "IS_OP" and _may_be_tensor(before, variables)):
                line = found.positions and found.positions.lineno
                return describe(traceback.FrameSummary(part.co_filename, line or 0, part.co_name))
            before.append(found)
    return None


def _may_be_tensor(before: list[dis.Instruction], variables: dict[str, Any]) -> bool:
    """Tell whether the value that these instructions have loaded last may be a tensor."""
    attributes: list[str] = []
    for found in reversed(before):
        if found.opname == "LOAD_ATTR":
            attributes.append(found.argval)
        elif found.opname in ("LOAD_GLOBAL", "LOAD_NAME"):  # a class, a member of an enum
            value = variables.get(found.argval, getattr(builtins, found.argval, None))
            for name in reversed(attributes):
                value = getattr(value, name, None)
            return isinstance(value, torch.Tensor)
        else:
            return found.opname.startswith(_MAY_BE_TENSORS)
    return False
