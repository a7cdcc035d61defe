"""Kinds of arguments under `tpmap`: how they reach the devices, and whether they suit that."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike

from torch_shard._common.random import wrap_seed
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._interop import call_jax
from torch_shard._spmd.maps import names_of

Check = Callable[[PyTree, int], str | None]

VALUES = jax.Array | np.ndarray | np.generic | int | float | complex
"""What may be mapped: bools are ints."""


@dataclasses.dataclass(frozen=True)
class ArgKind:
    """The way in which an argument of a function under `tpmap` reaches the devices.

    The strings that `tpmap` takes are names of such objects; make your own for another way.

    Attributes:
        spread: Maps a leaf of the argument and the number of devices to a tensor of shape (num_devices, ...), whose
            rows the devices see; a torch function. None gives the whole leaf to every device.
        join: Its inverse, if `wrap_return` may name this kind: maps a result of shape (num_devices, ...) to what is
            returned.
        check: Says what is wrong with a leaf, for that number of devices, or None. Leaves are arrays, with a `shape`,
            or Python numbers.
        needs_leaves: True makes an argument without any tensor an error.

    Example:
        >>> import torch, torch_shard as ts
        >>> dealt = ts.ArgKind(spread=lambda x, n: x.reshape(-1, n, *x.shape[1:]).movedim(1, 0))  # like cards
        >>> ts.tpmap(lambda x: x, "i", [dealt])(torch.arange(16))[0].tolist()
        [0, 8]
    """

    spread: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    join: Callable[[torch.Tensor], torch.Tensor] | None = None
    check: Check = lambda leaf, num_devices: None
    needs_leaves: bool = True


def _check_shard(leaf: ArrayLike, num_devices: int) -> str | None:
    shape = np.shape(leaf)
    if not shape:
        return "is a scalar, which has no leading dim to split"
    if shape[0] % num_devices:
        return f"has {shape[0]} rows, which do not divide among {num_devices} devices: pad or drop some"
    return None


def _check_thru(leaf: ArrayLike, num_devices: int) -> str | None:
    shape = np.shape(leaf)
    if not shape or shape[0] != num_devices:
        return f"must have a leading dim of {num_devices}, one row for each device"
    return None


def _check_rng(leaf: ArrayLike, num_devices: int) -> str | None:
    if isinstance(leaf, int | np.integer) and not isinstance(leaf, bool):
        return None if 0 <= leaf < 2**32 else f"is the seed {leaf}: give one from 0 to 2**32 - 1"
    if is_typed_key(leaf):
        is_key = np.shape(leaf) == () and jax.random.key_impl(leaf) == "threefry2x32"
    else:
        is_key = getattr(leaf, "dtype", None) == np.uint32 and np.shape(leaf) == (2,)
    return None if is_key else "is neither one key of JAX (jax.random.key(0), or its two words) nor an integer seed"


def _split_key(words: torch.Tensor, num_devices: int) -> torch.Tensor:
    return call_jax(lambda key: jax.random.key_data(jax.random.split(wrap_seed(key), num_devices)), words)


BROADCAST = ArgKind(needs_leaves=False)

RNG = ArgKind(_split_key, check=_check_rng)

STATIC = ArgKind(needs_leaves=False)

KINDS = {
    "broadcast": BROADCAST,
    "shard": ArgKind(lambda x, n: x.reshape(n, x.shape[0] // n, *x.shape[1:]), lambda x: x.flatten(0, 1), _check_shard),
    "rng": RNG,
    "static": STATIC,
    "thru": ArgKind(lambda x, n: x, lambda x: x, _check_thru),
}

Kind = str | ArgKind


def kind_of(where: str, kind: object) -> ArgKind:
    if isinstance(kind, ArgKind):
        return kind
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    close = difflib.get_close_matches(str(kind), KINDS, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"tpmap: {where} is {kind!r}, which is not a kind of argument. {hint}The kinds are "
        f"{', '.join(map(repr, KINDS))}, or an ArgKind of your own."
    )


class ArgKinds:
    """The kinds of all arguments, by position and by name."""

    def __init__(self, f: Callable[..., object], argtypes: Sequence[Kind], kwargtypes: Mapping[str, Kind]) -> None:
        check_kind("argtypes", argtypes, Sequence)
        check_kind("kwargtypes", kwargtypes, Mapping)
        self._positional = [kind_of(f"argtypes[{i}]", kind) for i, kind in enumerate(argtypes)]
        self._named = {name: kind_of(f"kwargtypes[{name!r}]", kind) for name, kind in kwargtypes.items()}
        self.names = names_of(f, len(self._positional))
        self._what = getattr(f, "__qualname__", type(f).__name__)

    def map(
        self, fn: Callable[[ArgKind, PyTree], PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """Apply `fn` to each kind and its argument; gives `(args, kwargs)`."""
        found = tuple(fn(kind, value) for kind, value in zip(self._positional, args, strict=True))
        return found, {name: fn(self._named[name], value) for name, value in kwargs.items()}

    def items(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> Iterator[tuple[str, ArgKind, PyTree]]:
        """Each argument with its name and kind."""
        yield from zip(self.names, self._positional, args, strict=True)
        yield from ((name, self._named[name], value) for name, value in kwargs.items())

    def select(self, kind: ArgKind, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        """The arguments of one kind, the others as None."""
        return self.map(lambda k, value: value if k is kind else None, args, kwargs)

    def check(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], num_devices: int) -> None:
        """Refuse arguments that were not announced, or that do not suit their kinds."""
        if len(args) != len(self._positional):
            announced = ", ".join(self.names)
            raise ValueError(
                f"tpmap: {self._what} takes {len(self._positional)} positional arguments by its argtypes "
                f"({announced}), and got {len(args)}. Arguments that are passed by name need an entry in kwargtypes."
            )
        if unknown := [name for name in kwargs if name not in self._named]:
            raise ValueError(
                f"tpmap: {self._what} got the keyword {unknown[0]!r}, and its kwargtypes name {list(self._named)}."
            )
        given = self.items(args, kwargs)
        faults = [fault for name, kind, value in given for fault in _faults(name, kind, value, num_devices)]
        if faults:
            raise ValueError(f"tpmap: arguments of {self._what}:\n\n" + "\n".join(f"  {fault}" for fault in faults))


def _faults(name: str, kind: ArgKind, value: PyTree, num_devices: int) -> Iterator[str]:
    """Faults of an argument of this kind."""
    if kind is STATIC:
        yield from _static_faults(name, value)
        return
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if kind.needs_leaves and not leaves:
        yield f"{name} is {value!r}: it holds no tensor"
    for path, leaf in leaves:
        where = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim:
            where += f" {leaf.shape}"
        if not isinstance(leaf, VALUES):
            yield f'{where} is {leaf!r}, which is not a tensor: the kind of Python values is "static"'
        elif kind is not RNG and is_typed_key(leaf):
            yield f'{where} is a key of JAX: its kind is "rng"'
        elif fault := kind.check(leaf, num_devices):
            yield f"{where} {fault}"


def _static_faults(name: str, value: object) -> Iterator[str]:
    """JAX takes what is not hashable, and a list that has changed would still be equal to itself."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        yield f'{name} is "static", and holds a tensor: programs are made for the values of static arguments'
        return
    try:
        hash(value)
    except TypeError:
        yield f'{name} is "static", and a {type(value).__name__} is not hashable: pass a tuple, a string, a number'


def is_typed_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
