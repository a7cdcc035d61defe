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
import inspect
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
    globals_, attributes, modules, assigned = set[str](), set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation == "STORE_GLOBAL":
            assigned.add(name)
        if operation.startswith(("STORE_", "DELETE_")):
            continue
        if operation in _OF_GLOBALS:
            globals_.add(name)
        elif instruction.opcode in dis.hasname:
            attributes.add(name)
        if operation == "IMPORT_NAME":
            modules.add(name)

    # `getattr(self, "scale")` and `globals()["scale"]` name what they read by a constant.
    if not _GETS_ANY.isdisjoint(attributes | globals_):
        attributes |= _words(code.co_consts)
    if "globals" in globals_:
        globals_ |= _words(code.co_consts)

    for const in code.co_consts:
        if isinstance(const, CodeType):
            inner = _named(const)
            globals_ |= inner.globals
            attributes |= inner.attributes
            modules |= inner.modules
            assigned |= inner.assigned
    return _Named(frozenset(globals_), frozenset(attributes), frozenset(modules), frozenset(assigned))


def _words(consts: tuple[object, ...]) -> set[str]:
    """The names among constants, by which attributes are got."""
    words = set[str]()
    for const in consts:
        if isinstance(const, tuple):
            words |= _words(const)
        elif isinstance(const, str) and const.isidentifier():
            words.add(const)
    return words


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
        tensors_by_use: dict[str, dict[str, None]] = {}  # dicts as sets that are in order

        def note(use: str, key: int) -> None:
            tensors_by_use.setdefault(use, {})[names[key]] = None

        for variable, value in guard.hashed:
            if id(value) in names:
                note(f"{variable} has as keys or elements", id(value))
        for variable, value in guard.leaves:
            if type(value) is int and value in names:
                note(f"{variable} has the id() of", value)
            elif id(value) in names:
                line = self._line_that_compares(variable)
                if line is not None:
                    note(f"{line}\n  compares by identity, and {variable} has", id(value))

        if tensors_by_use:
            listed = "\n".join(f"  {use} {_few(tensors)}" for use, tensors in tensors_by_use.items())
            raise NotImplementedError(
                f"{what} looks for tensors of the model by identity:\n\n{listed}\n\nIn a program others are in their "
                "places, so that none would be found. Compare names (`for name, p in model.named_parameters()`), or "
                "put a flag on the module that has the tensor."
            )

    def _line_that_compares(self, variable: str) -> str | None:
        """A line with an `is` in code that names a variable."""
        last = variable.rpartition(".")[2]
        for line, names in self._compared.items():
            if last in names:
                return line
        return None

    def _wants(self, code: CodeType) -> bool:
        """Tell whether code is the user's own; of other code above PyTorch, only names matter."""
        is_own = is_own_file(code.co_filename)
        if is_own or is_user_file(code.co_filename):
            self._settings.update(code.co_names)
            if not _GETS_ANY.isdisjoint(code.co_names):
                self._settings |= _words(code.co_consts)
                self._any = True
        if is_own:
            self._own[id(code)] = _named(code)
            self._within.update(map(id, codes_in(code)))
        return is_own

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        mode = outermost_mode() if self._restore else self._mode
        if mode is not self._mode:
            self._begin_capture(mode)
        if code.co_name in _CONSTRUCTORS and code.co_argcount:
            made = frame.f_locals.get(code.co_varnames[0])
            self._made[id(made)] = made
        if code.co_filename.startswith("<") and not _is_typed(frame):
            return

        if (id(code),) not in self._closures:
            self._closures.add((id(code),))
            self._note_names(code, frame.f_globals)

        variables = frame.f_locals
        if code.co_freevars and id(code) not in self._within:
            cells = {name: variables[name] for name in code.co_freevars if name in variables}
            self._closure(code, cells, frame)

        names = self._own[id(code)].attributes
        num_arguments = code.co_argcount + code.co_kwonlyargcount
        num_arguments += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        for number, name in enumerate(code.co_varnames[:num_arguments]):
            value = variables.get(name)
            _refuse_types(code, value)
            if value is not None:
                name = type(value).__name__ if number == 0 and name == "self" else name
                self._object(name, value, names)

    def _begin_capture(self, mode: CaptureMode | None) -> None:
        """Let another capture take back what it leaves where an earlier one has read."""
        self._mode = mode
        for root in self._roots.values():
            self._note_held(root)
        for name, variables in self._assigned:
            self._note_assigned(name, variables)

    def _note_names(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Note what code names: globals, also those that are not there yet, and modules that it imports."""
        line = compared_line(code, variables)
        if line is not None:
            self._compared[line] = self._compared.get(line, frozenset()) | named_in(code)

        named = self._own[id(code)]
        names = named.attributes
        for name in sorted(named.globals):
            self._note((id(variables), name, names), Root(name, variables, name, names))
        for name in sorted(named.assigned - named.globals):
            self._assigned.append((name, variables))
            self._note_assigned(name, variables)
        for name in sorted(named.modules):
            module = sys.modules.get(name)
            if module is not None:
                self._note((id(module), names), Root(name, None, module, names))

    def _leave(self, frame: FrameType, value: object) -> None:
        if frame.f_code.co_name == "__new__":
            self._made[id(value)] = value

        caller = frame.f_back
        named = None if caller is None else self._own.get(id(caller.f_code))
        if caller is None or named is None:
            return
        _refuse_types(caller.f_code, value)
        if value is not None:
            self._object(f"{frame.f_code.co_name}()", value, named.attributes)

    def _object(self, name: str, value: Any, names: Names, depth: int = 1) -> None:
        """Note an object that a function is given, or what a container of such has in it."""
        if isinstance(value, (str, bytes, int, float, torch.Tensor)):
            return
        if isinstance(value, (tuple, list, dict)) and not is_record(value):
            if depth:
                # By the methods of Python's own classes: those of a subclass may note that they are read.
                base: Any = next(kind for kind in (tuple, list, dict) if isinstance(value, kind))
                items_of: Any = dict.values if base is dict else base.__iter__
                for item in items_of(value):
                    self._object(name, item, names, depth - 1)
            return

        key = id(value), names
        if key in self._roots or id(value) in self._made or not hasattr(value, "__dict__"):
            return
        if not isinstance(value, nn.Module):
            attributes = vars(value).values()
            if any(isinstance(each, torch.Tensor) and hasattr(each, "fake_mode") for each in attributes):
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

    def fits(candidate: object) -> bool:
        if not isinstance(candidate, types.FunctionType) or candidate.__code__ is not code:
            return False
        for name, cell in zip(code.co_freevars, candidate.__closure__ or (), strict=True):
            if attribute_of(cell, "cell_contents") is not values.get(name):
                return False
        return True

    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    likely: list[Any] = [frame.f_globals.get(code.co_name)]
    likely += [vars(cls).get(code.co_name) for cls in type(first).__mro__]
    for candidate in likely:
        if fits(candidate):
            return candidate
    # A frame does not say of which function it is. All that refer to its code are looked at, which takes milliseconds.
    return next(filter(fits, gc.get_referrers(code)), None)  # pyright: ignore[reportReturnType]


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
        for instruction in dis.get_instructions(part):
            name = instruction.argval
            calls_id = instruction.opname == "LOAD_GLOBAL" and name == "id" and "id" not in variables
            calls_operator = instruction.opcode in dis.hasname and name in ("is_", "is_not")  # of the module operator
            compares = instruction.opname == "IS_OP" and _may_be_tensor(before, variables)
            if calls_id or calls_operator or compares:
                line = instruction.positions and instruction.positions.lineno
                return describe(traceback.FrameSummary(part.co_filename, line or 0, part.co_name))
            before.append(instruction)
    return None


def _may_be_tensor(before: list[dis.Instruction], variables: dict[str, Any]) -> bool:
    """Tell whether the value that these instructions have loaded last may be a tensor."""
    attributes: list[str] = []
    for instruction in reversed(before):
        operation, name = instruction.opname, instruction.argval
        if operation == "LOAD_ATTR":
            attributes.append(name)
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):  # a class, a member of an enum
            value = variables.get(name, getattr(builtins, name, None))
            for attribute in reversed(attributes):
                value = getattr(value, attribute, None)
            return isinstance(value, torch.Tensor)
        else:
            return operation.startswith(_MAY_BE_TENSORS)
    return False
