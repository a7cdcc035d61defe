"""Arguments of the wrong kind, refused by their names before anything runs."""

import contextlib
import inspect
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args

import numpy as np

from torch_shard._common.caller import caller

MAX_SEED = 2**32 - 1
"""JAX cuts a seed to 32 bits, so that a larger one would give the numbers of another."""


def check_kind(argument: str, value: object, kind: Any, *, hint: str = "") -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        kinds = cast(tuple[type, ...], get_args(kind) or (kind,))
        wanted = " or ".join("None" if k is NoneType else _with_article(k.__name__) for k in kinds)
        raise TypeError(f"{caller()}: {argument} must be {wanted}, got {type(value).__name__}.{hint and ' '}{hint}")


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def is_integer(value: object) -> bool:
    """Tell whether it is a whole number, Python's or numpy's; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(argument: str, value: object) -> None:
    """Refuse what is not a positive integer."""
    if not is_integer(value) or cast(int, value) < 1:
        raise ValueError(f"{caller()}: {argument} must be a positive integer, got {value!r}.")


def check_number(argument: str, value: object) -> None:
    """Refuse what is not a number of at least 0."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and value >= 0):
        raise ValueError(f"{caller()}: {argument} must be a number of at least 0, got {value!r}.")


def check_seed(value: object) -> int:
    """Check a seed, and return it as an int."""
    if not is_integer(value) or not 0 <= cast(int, value) <= MAX_SEED:
        raise ValueError(f"{caller()}: seed must be an int of 32 bits, from 0 to {MAX_SEED}, got {value!r}.")
    return int(cast(int, value))


def check_call(argument: str, value: object, *names: str, hint: str = "") -> None:
    """Refuse what cannot be called with so many arguments."""
    check_kind(argument, value, Callable, hint=hint)
    try:
        signature = inspect.signature(cast(Callable[..., object], value))
    except (TypeError, ValueError):  # of C, which does not say
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        given = f"({', '.join(names)})"
        raise TypeError(
            f"{caller()}: {argument} is called with {given}, but {_name_of(value)}{_parameters(signature)} cannot be: "
            f"{error}.{hint and ' '}{hint}"
        ) from None


def _name_of(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _parameters(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


def as_positions(argument: str, positions: object, names: Sequence[str]) -> tuple[int, ...]:
    """Positions of arguments of these names, counted from the first."""
    found = (positions,) if is_integer(positions) else positions
    if isinstance(found, str) or not isinstance(found, Iterable) or not all(map(is_integer, cast(Any, found))):
        raise TypeError(
            f"{caller()}: {argument} must be a position of an argument, or a tuple of them, got {positions!r}."
        )
    found = tuple(cast(Iterable[int], found))
    for position in found:
        if not -len(names) <= position < len(names):
            raise ValueError(
                f"{caller()}: {argument} has {position}, and the function was called with {len(names)} arguments "
                f"({', '.join(names)})."
            )
    return tuple(position % len(names) for position in found)


@contextlib.contextmanager
def named(what: str) -> Generator[None, None, None]:
    """Let an error about a value say which one it is."""
    kinds: tuple[type[Exception], ...] = (TypeError, OverflowError, NotImplementedError)
    try:
        yield
    except kinds as error:
        kind = next(kind for kind in kinds if kind in type(error).__mro__)
        raise kind(f"{caller()}: {what}: {error}") from error


def check_path(argument: str, value: object, *, hint: str = "") -> Path:
    """Check that an argument can be the path of a file or a directory, which may be yet to be made, and return it."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{caller()}: {argument} must be a path, got {type(value).__name__}.{hint and ' '}{hint}")
    text = os.fspath(cast(str | os.PathLike[str], value))
    if not text:
        raise ValueError(f"{caller()}: {argument} is empty. Name a file or a directory.")
    path = Path(text)
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        above = next(p for p in path.parents if p.exists())
        raise NotADirectoryError(
            f"{caller()}: {argument} is {path}, but {above} is a file. Name another path."
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{caller()}: {argument} cannot be {text!r:.200}: {reason}. Name another path.") from error
    return path


def check_directory(argument: str, value: object) -> Path:
    """Check that an argument is the path of a directory, which may be yet to be made, and return it."""
    path = check_path(argument, value)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{caller()}: {argument} must be a directory, but {path} is a file. Name another one.")
    return path


def check_file(argument: str, value: object) -> Path:
    """Check that an argument is the path of a file, which may be yet to be made, and return it."""
    path = check_path(argument, value)
    if path.is_dir():
        raise IsADirectoryError(f"{caller()}: {argument} must be a file, but {path} is a directory. Name a file in it.")
    return path
