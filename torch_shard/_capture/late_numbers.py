"""Numbers that a program gives: Python may keep them and compute with them before their values are known.

`loss.item()` in a captured function is such a number. Python's list, attribute or sum gets a `LateNumber`, which
remembers what was computed of which tensors. It stands for a `float` (or an `int`, a `bool`) to `isinstance`. Whoever
asks for its value (`if`, `int()`, an index) is answered if the host can compute it, and refused if not.
"""

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from torch_shard._common.patching import patched

OF_A_TEXT = "\ufdd0"
"""What stands in a text for a number that is formatted later begins with this: Unicode keeps it for such use."""

Number = bool | int | float | complex

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


class Expression(Protocol):
    """What a number is computed of."""

    kind: type
    """The class of its value."""


class Item:
    """The only element of a tensor that a program gives, by its position among these; or the tensor itself.

    Args:
        position: Among the tensors that the program gives.
        kind: The class of the number, or `torch.Tensor`.
        dtype: As torch has it, of a tensor.
    """

    def __init__(self, position: int, kind: type, dtype: torch.dtype | None = None) -> None:
        self.position, self.kind, self.dtype = position, kind, dtype


class Old:
    """The number that a place held before the call, by the key of the place."""

    def __init__(self, place: Hashable, kind: type) -> None:
        self.place, self.kind = place, kind


class Computed:
    """A function of other expressions and of plain numbers."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kind: type) -> None:
        self.function, self.args, self.kind = function, args, kind


def is_expression(value: object) -> bool:
    """Tell whether a value is an expression, rather than a plain number."""
    return isinstance(value, (Item, Old, Computed))


def evaluate(expression: Any, items: Sequence[Any] | Mapping[int, Any], old: Mapping[Hashable, Any]) -> Any:
    """The value of an expression.

    Args:
        expression: An expression, or a plain value, which is its own.
        items: The values of the tensors, by position.
        old: The values of the places, by key.
    """
    match expression:
        case Item():
            return items[expression.position]
        case Old():
            return old[expression.place]
        case Computed():
            return expression.function(*(evaluate(argument, items, old) for argument in expression.args))
        case _:
            return expression


def partly_evaluated(expression: Any, old: Mapping[Hashable, Any]) -> Any:
    """An expression with the values of places in it, or its value if it needs no more.

    Args:
        expression: An expression, or a plain value.
        old: The values of places that are known, by key.
    """
    if isinstance(expression, Old):
        return old.get(expression.place, expression)
    if not isinstance(expression, Computed):
        return expression
    args = tuple(partly_evaluated(argument, old) for argument in expression.args)
    if not any(map(is_expression, args)):
        return expression.function(*args)
    partly: Any = getattr(expression.function, "partly", None)  # of a text
    return Computed(expression.function, args, expression.kind) if partly is None else partly(args)


def leaves_of(expression: Any) -> list[Item | Old]:
    """The items and old values that an expression depends on."""
    if isinstance(expression, (Item, Old)):
        return [expression]
    if isinstance(expression, Computed):
        return [leaf for argument in expression.args for leaf in leaves_of(argument)]
    return []


def key_of(expression: Any) -> object:
    """The same for expressions that compute the same."""
    match expression:
        case Item():
            return "item", expression.position, expression.kind
        case Old():
            return "old", expression.place
        case Computed():
            return expression.function, tuple(map(key_of, expression.args))
        case bool() | int() | float() | complex() | str() | None:
            return type(expression), repr(expression)
        case _:
            return id(expression)


class LateNumber:
    """A number whose value is known later: after the call of a program, or as soon as somebody reads it.

    Args:
        expression: What it is computed of.
        ask: Gives the value of an expression, or raises.
        is_known: Whether the program has run, so that asking only waits for its result: arithmetic gives plain numbers.
        note: Is told of numbers that are computed of this one.
        show: Gives a text that stands for the value in a format, where it is not known.
    """

    __slots__ = ("__weakref__", "_ask", "_note", "_show", "expression", "is_known")

    def __init__(
        self,
        expression: Any,
        ask: Callable[[Any], Any],
        *,
        is_known: bool = False,
        note: Callable[["LateNumber"], object] | None = None,
        show: Callable[["LateNumber", str], str] | None = None,
    ) -> None:
        self.expression, self.is_known = expression, is_known
        self._ask, self._note, self._show = ask, note, show

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.expression.kind  # isinstance(number, float), as of what stands there in eager torch

    @property
    def value(self) -> Any:
        """The value, now. It waits for the program, or raises where there is none that could say it."""
        return self._ask(self.expression)

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function of this number and others: late, too, unless its value is there to be waited for."""
        if self.is_known:
            late = next((argument for argument in args if is_late(argument)), None)
            if late is not None:  # that of an earlier step meets one of this step
                return late.computed(function, *args)
            return function(*(plain(argument) for argument in args))
        operands = tuple(_operand(argument) for argument in args)
        kind = _kind_of_result(function, operands)
        if kind is None:
            return function(*(plain(argument) for argument in args))
        number = LateNumber(Computed(function, operands, kind), self._ask, note=self._note, show=self._show)
        if self._note is not None:
            self._note(number)
        return number

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return self.__format__("")

    def __repr__(self) -> str:
        return self.__format__("")

    def __format__(self, spec: str) -> str:
        if self.is_known or self._show is None:
            return format(self.value, spec)
        return self._show(self, spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **options: Any) -> Any:
        if method == "__call__" and not options and all(_is_number(argument) for argument in args):
            return self.computed(ufunc, *args)
        return getattr(ufunc, method)(*(plain(argument) for argument in args), **options)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        # An object with this method is taken by torch's functions in the place of any number.
        args, kwargs = torch_pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # is_integer, real, numerator, ...
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __copy__(self) -> "LateNumber":
        return self

    def __deepcopy__(self, memo: object) -> "LateNumber":
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        return type(self.value), (self.value,)  # in a file it is the number

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        return self.computed(round, self) if digits is None else self.computed(round, self, digits)


def plain(value: Any) -> Any:
    """A number as it is; the value of one that is late."""
    return value.value if type(value) is LateNumber else value


def is_late_number(value: object) -> bool:
    """Tell whether a value is a late number of a program that has not run."""
    return type(value) is LateNumber and not value.is_known


def is_late(value: object) -> bool:
    """Tell whether a value is a late number, or a text with one, of a program that has not run."""
    return OF_A_TEXT in value if type(value) is str else is_late_number(value)


def is_old(value: object) -> bool:
    """Tell whether a value stands for the number that was at a place before."""
    return type(value) is LateNumber and isinstance(value.expression, Old)


def _is_number(value: object) -> bool:
    return type(value) is LateNumber or isinstance(value, _NUMBERS)


def _operand(value: Any) -> Any:
    if type(value) is not LateNumber:
        return value
    return value.value if value.is_known else value.expression


def _kind_of_result(function: Callable[..., Any], operands: Sequence[Any]) -> type | None:
    """The class of a result, as of operands that are one; None if Python must know the values for it."""
    if isinstance(operands[-1], (Item, Old, Computed)) and function is operator.pow:
        return None if operands[-1].kind is not float else float
    samples = (operand.kind(1) if is_expression(operand) else operand for operand in operands)
    try:
        result = function(*samples)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return cast(type, type(result)) if isinstance(result, _NUMBERS) else None


def _binary(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(number: LateNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(number.value, other)
        return number.computed(function, number, other) if _is_number(other) else NotImplemented

    def reflected(number: LateNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(other, number.value)
        return number.computed(function, other, number) if _is_number(other) else NotImplemented

    return forward, reflected


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda number: number.computed(function, number)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _forward, _reflected = _binary(getattr(operator, _name))
    setattr(LateNumber, f"__{_name.rstrip('_')}__", _forward)
    setattr(LateNumber, f"__r{_name.rstrip('_')}__", _reflected)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LateNumber, f"__{_name}__", _binary(getattr(operator, _name))[0])
for _name in ("neg", "pos", "abs", "invert"):
    setattr(LateNumber, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in ("trunc", "floor", "ceil"):
    setattr(LateNumber, f"__{_name}__", _unary(getattr(math, _name)))


def _late(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        late = next((argument for argument in args if type(argument) is LateNumber), None)
        if late is None or kwargs or not all(_is_number(argument) for argument in args):
            return original(*args, **kwargs)
        return late.computed(original, *args)

    return function


_OF_MATH = tuple(
    name for name in ("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "pow", "isnan", "isinf", "isfinite")
)
"""Functions of the module math, which read the value of a float past its methods: perplexities and the like."""


def patched_math() -> Sequence[Any]:
    """Contexts in which these functions take late numbers."""
    return [patched(math, name, _late) for name in _OF_MATH]
