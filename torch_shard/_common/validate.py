"""Arguments of the wrong kind, refused by their names before anything runs."""

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast, get_args

import numpy as np
from torch import nn

from torch_shard._common.caller import caller

MAX_SEED = 2**32 - 1
"""JAX cuts a seed to 32 bits, so that a larger one would give the numbers of another."""


def check_kind(argument: str, value: object, kind: Any, *, hint: str = "") -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        names = [k.__name__ for k in cast(tuple[type, ...], get_args(kind) or (kind,))]
        wanted = " or ".join("None" if n == "NoneType" else f"a{'n' * (n[0] in 'AEIOUaeiou')} {n}" for n in names)
        raise TypeError(f"{caller()}: {argument} must be {wanted}, got {type(value).__name__}.{hint and ' '}{hint}")


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether it is a whole number, Python's or numpy's; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(argument: str, value: object) -> None:
    """Refuse what is not a positive integer."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"{caller()}: {argument} must be a positive integer, got {value!r}.")


def check_number(argument: str, value: object) -> None:
    """Refuse what is not a number of at least 0."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and value >= 0):
        raise ValueError(f"{caller()}: {argument} must be a number of at least 0, got {value!r}.")


def check_seed(value: object) -> int:
    """Check a seed, and return it as an int."""
    if _is_random_key(value):
        raise TypeError(
            f"{caller()}: seed must be an int of 32 bits, got a random key of JAX. Give the number that the key was "
            "made of: seed=0, not seed=jax.random.key(0). Keys are made of it here."
        )
    if not is_integer(value) or not 0 <= value <= MAX_SEED:
        raise ValueError(f"{caller()}: seed must be an int of 32 bits, from 0 to {MAX_SEED}, got {value!r}.")
    return int(value)


def _is_random_key(value: object) -> bool:
    """Tell whether it looks like what jax.random.key or PRNGKey gives: this file is for packages without JAX too."""
    dtype, shape = str(getattr(value, "dtype", "")), getattr(value, "shape", None)
    return dtype.startswith("key<") or (dtype == "uint32" and shape == (2,))


def check_call(argument: str, value: object, *names: str, hint: str = "") -> None:
    """Refuse what cannot be called with so many arguments."""
    check_kind(argument, value, Callable, hint=hint)
    signature = signature_of(cast(Callable[..., object], value))
    if signature is None:
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(
            f"{caller()}: {argument} is called with ({', '.join(names)}), but "
            f"{name}({', '.join(signature.parameters)}) cannot be: {error}.{hint and ' '}{hint}"
        ) from None


def signature_of(fn: Callable[..., object]) -> inspect.Signature | None:
    """The parameters of a function; None of one in C that does not say them."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


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


# Modules within the wrappers of PyTorch: `torch.compile`, `DistributedDataParallel` and `DataParallel`.


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that wrappers run, itself without one: names are its own, without `module.` and `_orig_mod.`."""
    inner: Any = module
    while (held := _held_by(inner)) is not None:
        inner = held
    return inner


def run_without_dynamo(module: nn.Module) -> None:
    """Let what `torch.compile` made of a module run it as it is: dynamo knows no tensors of the device `jax`."""
    inner: Any = module
    while (held := _held_by(inner)) is not None:
        if hasattr(inner, "_orig_mod"):
            vars(inner)["forward"] = held.__call__
        inner = held


def check_module(argument: str, value: nn.Module) -> nn.Module:
    """Refuse what is not a module; gives it without wrappers."""
    check_kind(argument, value, nn.Module)
    return unwrapped(value)


def _held_by(module: Any) -> nn.Module | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return cast(nn.Module, module.module)  # pyright: ignore[reportUnknownMemberType]
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # its import takes seconds
    return module._orig_mod if compiled is not None and isinstance(module, compiled) else None
