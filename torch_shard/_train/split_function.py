"""A function of the user in two: what comes before a statement with it, and what comes after it.

Both are compiled from the syntax tree of the user's own file, so that their lines are the user's, and share the
globals and the enclosing variables of the function.
"""

import ast
import copy
import dataclasses
import linecache
import types
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, cast

_OF_ALL_NAMES = ("locals", "vars", "dir", "eval", "exec")

Place = tuple[int | None, int | None, int | None, int | None]


class CannotSplitError(Exception):
    """Why a function cannot be cut at a statement."""


@dataclasses.dataclass(frozen=True)
class Halves:
    """A function that was cut.

    Attributes:
        head: As far as a statement, with the parameters of the function.
        tail: The rest. Its parameters are the local variables that it reads or sets and that have a value then.
        following: The statements of the rest.
        place: Of the call at which it was cut.
        unbound: Local variables that the rest reads or sets and that had no value then.
    """

    head: types.FunctionType
    tail: types.FunctionType
    following: list[ast.stmt]
    place: Place
    unbound: frozenset[str]

    @property
    def variables(self) -> tuple[str, ...]:
        """The local variables that the rest takes."""
        code = cast(types.FunctionType, self.tail).__code__
        return code.co_varnames[: code.co_argcount]


def place_in(frame: FrameType) -> Place:
    """Where in its file a frame is: lines and columns of the expression."""
    return list(frame.f_code.co_positions())[frame.f_lasti // 2]


def split_at(function: types.FunctionType, frame: FrameType) -> Halves:
    """Cut a function behind the statement that a frame of it is at, which is a call and nothing else.

    Args:
        function: Of the user.
        frame: Of a call of it.

    Raises:
        CannotSplitError: There is no source, or what follows is not the rest of the function alone.
    """
    code = function.__code__
    definition, place = _definition_of(code), place_in(frame)
    _refuse_what_a_cut_changes(definition, code)
    following = _following(definition.body, _statement_at(definition, place), place)

    head = copy.deepcopy(definition)
    _truncate(head.body, _statement_at(head, place))
    _declare_only_used(head)
    head.decorator_list = definition.decorator_list[:1]

    local = ({*code.co_varnames} | {*code.co_cellvars}) & _names_in(following)
    bound = sorted(local & set(frame.f_locals))
    unbound = local - {*bound}
    tail = copy.deepcopy(definition)
    tail.args = ast.arguments([], [ast.arg(name) for name in bound], None, [], [], None, [])
    never = ast.parse("if 0:\n" + "".join(f"    {name} = None\n" for name in sorted(unbound))).body if unbound else []
    tail.body = [*never, *copy.deepcopy(following)] or [ast.Pass()]  # names that are set are those of a function
    tail.decorator_list, tail.returns = [], None
    _declare(tail, definition, code, _names_set(following))
    return Halves(_compiled(head, function), _compiled(tail, function), following, place, frozenset(unbound))


def _refuse_what_a_cut_changes(definition: ast.FunctionDef, code: CodeType) -> None:
    names = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    if found := sorted(name for name in names | attributes if name.startswith("__") and not name.endswith("__")):
        raise CannotSplitError(f"{found[0]} is a private name of a class: use one underscore")
    if "__class__" in code.co_freevars:
        raise CannotSplitError("super() is used: call the class by its name")
    if found := sorted(names & {*_OF_ALL_NAMES} & {*code.co_names}):
        raise CannotSplitError(f"{found[0]}() is used, which would see a part of the local variables")


def _definition_of(code: CodeType) -> ast.FunctionDef:
    """The syntax tree of the definition that code was compiled from."""
    text = "".join(linecache.getlines(code.co_filename))
    for node in ast.walk(ast.parse(text)) if text else ():
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise CannotSplitError(f"the source of {code.co_name} is not there. Define it in a file or a cell of a notebook")


def _statement_at(definition: ast.FunctionDef, place: Sequence[int | None]) -> ast.stmt:
    """The innermost statement in which an instruction is."""
    line, _, column, _ = place
    found: ast.stmt = definition
    for node in ast.walk(definition):
        if isinstance(node, ast.stmt) and _has(node, line, column):
            found = node  # inner nodes come later
    return found


def _has(node: ast.stmt, line: int | None, column: int | None) -> bool:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return begin <= (line or 0, column or 0) < end


def _following(body: list[ast.stmt], statement: ast.stmt, place: Place) -> list[ast.stmt]:
    """The statements that run after one of a body, or after one of the branches in it."""
    index = next(number for number, each in enumerate(body) if each is statement or statement in ast.walk(each))
    rest, around = body[index + 1 :], body[index]
    if around is statement:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if call is None or (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) != place:
            raise CannotSplitError("it is a part of another statement: write it on a line of its own")
        return rest
    if isinstance(around, ast.With):
        raise CannotSplitError("a `with` is around it: end the `with` before it")
    if not isinstance(around, ast.If):
        raise CannotSplitError("it is in a loop, a `try` or another function: write it in the function itself")
    within = next(block for block in (around.body, around.orelse) if any(statement in ast.walk(s) for s in block))
    return [*_following(within, statement, place), *rest]


def _truncate(body: list[ast.stmt], statement: ast.stmt) -> None:
    """Leave out what follows on a statement."""
    index = next(number for number, each in enumerate(body) if each is statement or statement in ast.walk(each))
    del body[index + 1 :]
    around = body[index]
    if isinstance(around, ast.If):
        for block in (around.body, around.orelse):
            if any(statement in ast.walk(each) for each in block):
                _truncate(block, statement)


def _declare_only_used(head: ast.FunctionDef) -> None:
    """Take names out of `global` and `nonlocal` that only the rest uses: the head would be guarded for them."""
    used = _names_in(head.body)
    for node in ast.walk(head):
        for name, statements in ast.iter_fields(node):
            if isinstance(statements, list):
                setattr(node, name, [_only_used(each, used) for each in cast(list[Any], statements)])


def _only_used(statement: Any, used: set[str]) -> Any:
    if not isinstance(statement, (ast.Global, ast.Nonlocal)):
        return statement
    names = [name for name in statement.names if name in used]
    return ast.copy_location(type(statement)(names) if names else ast.Pass(), statement)


def _names_in(statements: Sequence[ast.stmt]) -> set[str]:
    names = {node.id for each in statements for node in ast.walk(each) if isinstance(node, ast.Name)}
    return names | _names_set(statements)


def _names_set(statements: Sequence[ast.stmt]) -> set[str]:
    return {name for each in statements for node in ast.walk(each) if (name := _name_that_is_set(node)) is not None}


def _name_that_is_set(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) if not isinstance(node.ctx, ast.Load):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.alias(name=name, asname=other):
            return other or name.partition(".")[0]
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
        case ast.MatchMapping(rest=name):
            return name
        case _:
            return None


def _declare(tail: ast.FunctionDef, definition: ast.FunctionDef, code: CodeType, names_set: set[str]) -> None:
    """Let names of the rest be global or of an enclosing function where they are that in the whole."""
    of_module = {name for node in ast.walk(definition) if isinstance(node, ast.Global) for name in node.names}
    for make, names in ((ast.Global, of_module), (ast.Nonlocal, {*code.co_freevars})):
        if found := sorted(names & names_set):
            tail.body.insert(0, make(found))


def _compiled(definition: ast.FunctionDef, function: types.FunctionType) -> types.FunctionType:
    """A function of a definition, with globals and enclosing variables of another one."""
    code = function.__code__
    keep = "_torch_shard_keep"
    definition.decorator_list = [
        ast.copy_location(ast.Name(keep, ast.Load()), decorator) for decorator in definition.decorator_list
    ]  # which say where the function begins
    _without_defaults(definition.args)
    module = ast.parse(f"def around({', '.join(code.co_freevars)}): pass")
    cast(ast.FunctionDef, module.body[0]).body = [definition]
    module = ast.fix_missing_locations(module)
    constants = compile(module, code.co_filename, "exec", dont_inherit=True, flags=code.co_flags & _FUTURE).co_consts
    inner = next(each for each in _codes(constants) if each.co_name == definition.name)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    made = types.FunctionType(
        inner, function.__globals__, function.__name__, None, tuple(cells[name] for name in inner.co_freevars)
    )
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__kwdefaults__, made.__defaults__ = None, None
    return made


_FUTURE = 0x1000000  # `from __future__ import annotations`


def _without_defaults(arguments: ast.arguments) -> None:
    """Take defaults and annotations away: all arguments are given."""
    arguments.defaults, arguments.kw_defaults = [], [None for _ in arguments.kwonlyargs]
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None


def _codes(constants: Sequence[Any]) -> Iterator[CodeType]:
    """The code objects among constants, and within these, outer ones first."""
    for constant in constants:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant.co_consts)
