"""Arguments of the wrong kind, refused by their names before anything runs."""

import os
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args

from torch_shard._common.caller import caller


def check_kind(argument: str, value: object, kind: Any, *, hint: str = "") -> None:
    """Refuse what is of another type.

    Args:
        argument: Its name.
        value: What was given.
        kind: A type, or a union of types.
        hint: What to do.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(value, kind):
        kinds = cast(tuple[type, ...], get_args(kind) or (kind,))
        wanted = " or ".join("None" if k is NoneType else _with_article(k.__name__) for k in kinds)
        raise TypeError(f"{caller()}: {argument} must be {wanted}, got {type(value).__name__}.{hint and ' '}{hint}")


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_path(argument: str, value: object, *, hint: str = "") -> Path:
    """Check that an argument is a path, and return it as one.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{caller()}: {argument} must be a path, got {type(value).__name__}.{hint and ' '}{hint}")
    return Path(cast(str | os.PathLike[str], value))


def check_directory(argument: str, value: object) -> Path:
    """Check that an argument is the path of a directory, which may be yet to be made, and return it.

    Raises:
        TypeError: It is not a path.
        NotADirectoryError: A file is there.
    """
    path = check_path(argument, value)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{caller()}: {argument} must be a directory, but {path} is a file. Name another one.")
    return path
