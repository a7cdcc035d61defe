"""Checks in source code: an `assert`, or an `if` that leads to nothing but a `raise` or a warning.

An instruction says which columns of which line it comes from, and the syntax tree says what stands there. So one
reading serves all versions of Python, whatever their instructions are called.
"""

import ast
import dis
import functools
import itertools
import linecache
from types import CodeType, FrameType
from typing import Any

_Place = tuple[int | None, int | None, int | None, int | None]

_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)

_ITEMWISE = (ast.In, ast.NotIn)
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)

_OF_NUMBERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_LOGGERS = ("logging", "logger", "log", "warnings")
_TELLS = ("warn", "warning", "warning_once", "error", "info", "debug", "critical", "exception")
_LOGS = (*_TELLS, "log")
_TRACKERS = ("wandb", "run")
_KEEPS_TEXTS = (
    *("append", "appendleft", "extend", "insert", "setdefault", "update"),
    *("add_text", "set_postfix", "set_postfix_str", "set_description"),
)
_PLAIN = (ast.Compare, ast.cmpop, ast.Attribute, ast.Name, ast.Constant, ast.expr_context)
_KEEPS = (ast.NamedExpr, *_LEAVES)


def leads_only_to_raise(frame: FrameType) -> bool | None:
    """The truth value that passes a check.

    Returns:
        The value for which the code goes on, if the other one leads straight to a `raise` that nothing in the same
        function catches, or to warnings and log messages alone; either one if it decides about nothing, and True where
        the code for it then does nothing. None where the value decides about anything else, and where there is no
        source to read.
    """
    source, code = _source_of(frame), frame.f_code
    if source is None:
        return None
    # An instruction takes two bytes.
    places = list(code.co_positions())[: frame.f_lasti // 2 + 1]
    asked = source.asked(places)
    if asked is None or source.first_line(asked) != code.co_firstlineno:  # the file has changed
        return None

    if source.is_settled(asked, frame):
        return isinstance(source.parents[asked].op, ast.And)
    if source.only_writes_where(asked):
        return True
    for falls_through in (False, True):
        for value in (True, False):
            if source.only_tells(value, asked, falls_through):
                return not value
    return None


def lengths_compared(frame: FrameType) -> list[Any]:
    """What has its lengths compared at the present instruction, which asks for one: `len(a) == len(b)`, and no more."""
    source, call = _node_at(frame)
    if source is None or call is None:
        return []
    match source.parents[call]:
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _OF_NUMBERS for op in ops):
            measured = [_measured(side) for side in (left, *others)]
        case _:
            return []

    names = {**frame.f_globals, **frame.f_locals}
    if "len" in names or None in measured:
        return []
    return [eval(compile(ast.Expression(of), "<check>", "eval"), names) for of in measured if of]


def only_tells_text(frame: FrameType) -> bool:
    """Tell whether the text that the present instruction makes is only told or kept, and by a name that says so.

    It is a part of what is given to `print`, to a logger or to `append`, of what an attribute or an item is set to, or
    of a variable that is used for such alone.
    """
    source, text = _node_at(frame)
    return source is not None and text is not None and source.is_only_told(text)


def _node_at(frame: FrameType) -> "tuple[_Source | None, Any]":
    """The source of a frame, and what stands there at the present instruction; None if the file has changed."""
    source = _source_of(frame)
    if source is None:
        return None, None
    place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    node = source.nodes.get(place)
    if node is None or source.first_line(node) != frame.f_code.co_firstlineno:
        return source, None
    return source, node


@functools.lru_cache(maxsize=1024)
def asks_for_types(code: CodeType) -> bool:
    """Tell whether code asks for the type of a value by `type(...)`, or compares with `is True` and the like."""
    if "type" in code.co_names:
        return True
    instructions = list(dis.get_instructions(code))
    pairs = itertools.pairwise(instructions)
    return any(after.opname == "IS_OP" and isinstance(before.argval, bool) for before, after in pairs)


def _measured(side: ast.expr) -> ast.expr | None:
    """What `len(...)` is of, if that is plain."""
    match side:
        case ast.Call(func=ast.Name(id="len"), args=[of], keywords=[]):
            plain = (ast.Subscript, ast.Attribute, ast.Name, ast.Constant, ast.expr_context)
            return of if all(isinstance(node, plain) for node in ast.walk(of)) else None
        case _:
            return None


def _source_of(frame: FrameType) -> "_Source | None":
    return _read("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


@functools.lru_cache(maxsize=32)
def _read(text: str) -> "_Source | None":
    try:
        return _Source(ast.parse(text)) if text else None
    except (SyntaxError, ValueError):
        return None


class _Source:
    """A syntax tree whose nodes know their places and their parents."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[Any, Any] = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.nodes = {_place(node): node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)}

    def asked(self, places: list[_Place]) -> ast.expr | None:
        """The expression whose truth an instruction asks for.

        Args:
            places: Of the instructions of a function up to this one. Where the last stands for a whole statement (in
                Python 3.11, and in an assert that pytest has rewritten), the one before it computed the value.
        """
        node = self.nodes.get(places[-1])
        if isinstance(node, ast.If | ast.Assert):
            statement = node
            places_before = [place for place in places if place != places[-1]]
            node = self.nodes.get(places_before[-1] if places_before else places[-1])
            if node is None or not any(node is part for part in ast.walk(statement.test)):
                return None

        # `not` gives a bool, so that what was asked is what it stands before.
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return node.operand
        return node if isinstance(node, ast.expr) and not _asks_another(node) else None

    def is_settled(self, asked: ast.expr, frame: FrameType) -> bool:
        """Tell whether a plain comparison after an expression decides the `and`, or the `or`, of both in any case."""
        both = self.parents[asked]
        if not isinstance(both, ast.BoolOp) or getattr(self.parents[both], "test", None) is not both:
            return False
        following = dict(itertools.pairwise(both.values)).get(asked)
        if following is None or any(not isinstance(node, _PLAIN) for node in ast.walk(following)):
            return False
        # Names, attributes and comparisons alone, as checked above, so that nothing happens by this.
        truth = eval(compile(ast.Expression(following), "<check>", "eval"), frame.f_globals, frame.f_locals)
        return truth is (not isinstance(both.op, ast.And))

    def only_writes_where(self, asked: ast.expr) -> bool:
        """Tell whether it is an `if mask.any():` that does nothing but write plain values to the places of the mask."""
        match self.parents[asked], asked:
            case (
                ast.If(test=test, body=body, orelse=[]),
                ast.Call(func=ast.Attribute(value=ast.Name(id=mask), attr="any"), args=[], keywords=[]),
            ) if test is asked:
                return all(_writes_where(statement, mask) for statement in body)
            case _:
                return False

    def is_only_told(self, text: ast.AST) -> bool:
        """Tell whether a text is only given to what tells or keeps it."""
        node, parent = text, self.parents[text]
        while _is_part_of_text(parent, node) or isinstance(parent, (*_DISPLAYS, ast.Starred)):
            if isinstance(parent, ast.Dict) and node in parent.keys:
                return False
            node, parent = parent, self.parents[parent]
        if isinstance(parent, ast.keyword):
            node, parent = parent, self.parents[parent]
        match parent:
            case ast.Call(func=function):
                return node is not function and _tells_or_keeps(function)
            case ast.Assign(targets=[ast.Name(id=name)]):
                return self._is_variable_told(parent, name)
            case ast.Assign(targets=targets):
                return all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
            case _:
                return False

    def _is_variable_told(self, statement: ast.AST, name: str) -> bool:
        """Tell whether a local variable is used for nothing but to tell or keep what it is assigned."""
        scope = self.parents[statement]
        while not isinstance(scope, _SCOPES):
            scope = self.parents[scope]
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            return False

        for node in ast.walk(scope):
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
                return False
            if not isinstance(node, ast.Name) or node.id != name or isinstance(node.ctx, ast.Store):
                continue
            if isinstance(self.parents[node], ast.Assign) or not self.is_only_told(node):
                return False
        return True

    def first_line(self, node: ast.AST) -> int:
        """The number of the line at which the function around a node begins."""
        while not isinstance(node, _SCOPES):
            node = self.parents[node]
        decorators = [d.lineno for d in getattr(node, "decorator_list", ())]
        return min([getattr(node, "lineno", 1), *decorators])

    def only_tells(self, value: bool, asked: ast.expr, falls_through: bool) -> bool:
        """Tell whether a truth value of an expression leads straight to a `raise`, or to nothing but warnings.

        Args:
            value: The truth value.
            asked: The expression.
            falls_through: The `raise` may also stand after the `if`, as after `if good: return`.
        """
        if isinstance(asked, ast.Compare) and len(asked.ops) > 1 and value:
            return False  # the next of the chain decides

        node: ast.AST = asked
        parent = self.parents[node]
        while isinstance(parent, ast.expr):
            truth = _truth_above(parent, node, value)
            if truth is None:
                return False
            node, value = parent, truth
            parent = self.parents[node]

        if not isinstance(parent, ast.If | ast.Assert) or node is not parent.test or self._is_caught(parent):
            return False
        if isinstance(parent, ast.Assert):
            return not value
        taken, other = (parent.body, parent.orelse) if value else (parent.orelse, parent.body)

        shows_a_message = any(isinstance(statement, ast.Expr) for statement in taken)
        if shows_a_message and all(map(_only_warns, [*taken, *other])):
            return True
        following = self._after(parent) if falls_through else []
        return _only_raises([*taken, *following])

    def _after(self, statement: ast.AST) -> list[ast.stmt]:
        """The statements that follow on one, as far as no loop or function ends."""
        parent = self.parents[statement]
        rest: list[ast.stmt] = []
        for name in ("body", "orelse", "finalbody"):
            block: list[Any] = getattr(parent, name, [])
            if statement in block:
                rest = block[block.index(statement) + 1 :]
                break
        return [*rest, *self._after(parent)] if isinstance(parent, ast.If | ast.With) else rest

    def _is_caught(self, statement: ast.stmt) -> bool:
        """Tell whether a `try` of the same function lies around; leaving a `with` block does not count."""
        node: ast.AST = statement
        while not isinstance(node, _SCOPES):
            parent = self.parents[node]
            if isinstance(parent, ast.Try | ast.TryStar) and (node in parent.body or parent.finalbody):
                return True
            node = parent
        return False


def _is_part_of_text(parent: ast.AST, node: ast.AST) -> bool:
    """Tell whether an expression is a text, and another one is a part of it."""
    match parent:
        case ast.FormattedValue() | ast.JoinedStr():
            return True
        case ast.BinOp(op=ast.Add() | ast.Mod()):
            return True
        case ast.Call(func=ast.Name(id="str" | "repr" | "format")):
            return node in parent.args
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="format")):
            return True
        case ast.keyword():
            return False
        case _:
            return False


def _tells_or_keeps(function: ast.expr) -> bool:
    """Tell whether a function is one of those that tell or keep what they are given, by its name."""
    match function:
        case ast.Name(id=name):
            return name == "print"
        case ast.Attribute(value=owner, attr=name):
            owner_name = _name_of(owner).strip("_").lower()
            if name in _LOGS:
                return owner_name in _LOGGERS or owner_name.endswith(("log", "logger")) or owner_name in _TRACKERS
            if name == "write":  # of a bar, and not of a file, in which the text would be at once
                return owner_name == "tqdm" or owner_name.endswith("bar")
            return name in _KEEPS_TEXTS
        case _:
            return False


def _place(node: ast.expr | ast.stmt) -> _Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _asks_another(node: ast.expr) -> bool:
    """Tell whether an instruction at this place asks for the truth of a part, as its result is none or never asked."""
    if not isinstance(node, ast.Compare):
        return isinstance(node, ast.BoolOp | ast.IfExp)
    compared = (node.left, *node.comparators)
    return any(isinstance(op, _ITEMWISE) for op in node.ops) or any(isinstance(side, _DISPLAYS) for side in compared)


def _truth_above(parent: ast.expr, node: ast.AST, value: bool) -> bool | None:
    """The truth of an expression if a part of it has this one; None if others decide too."""
    match parent:
        case ast.UnaryOp(op=ast.Not()):
            return not value
        case ast.BoolOp(op=ast.And(), values=values):
            return None if value and node is not values[-1] else value
        case ast.BoolOp(op=ast.Or(), values=values):
            return None if not value and node is not values[-1] else value
        case ast.IfExp(test=test):
            return None if node is test else value
        case ast.NamedExpr(target=target):
            return value if node is target else None
        case _:
            return None


def _only_raises(block: list[ast.stmt]) -> bool:
    """Tell whether every way through statements ends in a `raise`."""
    for statement in block:
        match statement:
            case ast.Raise():
                return True
            case ast.If(body=body, orelse=orelse) if _only_raises(body) and _only_raises(orelse):
                return True
            case ast.With(body=body) if _only_raises(body):
                return True
        if any(isinstance(node, _LEAVES) for node in ast.walk(statement)):
            return False
    return False


def _only_warns(statement: ast.stmt) -> bool:
    """Tell whether a statement does nothing but show a message."""
    if not isinstance(statement, ast.Expr) or any(isinstance(node, _KEEPS) for node in ast.walk(statement)):
        return isinstance(statement, ast.Pass)
    match statement.value:
        case ast.Call(func=ast.Name(id=name)):
            return name == "print" or "warn" in name
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _TELLS:
            return _name_of(owner).strip("_").lower() in _LOGGERS
        case _:
            return False


def _writes_where(statement: ast.stmt, mask: str) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Subscript(slice=ast.Name(id=index))], value=value):
            number = value.args[0] if isinstance(value, ast.Call) and _name_of(value.func) == "float" else value
            number = number.operand if isinstance(number, ast.UnaryOp) else number
            return index == mask and isinstance(number, ast.Constant)
        case _:
            return False


def _name_of(owner: ast.expr) -> str:
    """The last name of what a method belongs to."""
    match owner:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id="logging"), attr="getLogger")):
            return "logger"
        case _:
            return ""
