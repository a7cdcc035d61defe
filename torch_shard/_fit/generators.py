"""Random numbers of one epoch: of the global generators, and of those that a loader holds."""

import gc
import hashlib
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_MOST_ITEMS, _MOST_OBJECTS = 64, 10_000  # of a container that may hold generators, and not data; in all

_OPAQUE = (str, bytes, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray, torch.nn.Module)


_GLOBAL = (random, np.random, torch.default_generator)
"""Python's and NumPy's global ones, which are modules, and torch's."""


class Streams:
    """Within a `with`, the generators go on where the last one left off; outside they are as they were."""

    def __init__(self, held: list[Any], seed: np.random.SeedSequence) -> None:
        self._all: list[Any] = [*_GLOBAL, *held]
        words = map(int, seed.generate_state(len(self._all)))
        self._inside = [_fresh(generator, word) for generator, word in zip(self._all, words, strict=True)]
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = self._swap(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._swap(self._outside)

    def _swap(self, states: list[Any]) -> list[Any]:
        """Take these up, and return those of before."""
        before = list(map(_state, self._all))
        for generator, state in zip(self._all, states, strict=True):
            _set_state(generator, state)
        return before


def reseed(held: Iterable[Any], *words: int) -> None:
    """Let the global generators and these go on from what follows from some numbers, and from nothing else."""
    seed = int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest()) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(held):
        _set_state(generator, _fresh(generator, seed ^ number))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _fresh(generator: Any, seed: int) -> Any:
    """The state of a generator of this kind from a seed."""
    if hasattr(generator, "getstate"):
        return random.Random(seed).getstate()
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed).get_state()
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator)(seed).state
    bits = type(generator._bit_generator) if isinstance(generator, np.random.RandomState) else np.random.MT19937
    return np.random.RandomState(bits(seed)).get_state()


def find_generators(loader: Any) -> list[Any]:
    """The random generators that a loader holds: in attributes, closures and small containers, at any depth.

    Also those that its classes' methods and its functions name as globals. (Not those in long lists of data, nor what
    is made while batches are drawn.)
    """
    found: dict[int, Any] = {}
    seen: dict[int, object] = {}
    waiting = [loader]
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        if not isinstance(value, GENERATORS):
            waiting += reversed(list(_parts(value)))
        elif not isinstance(value, random.SystemRandom):
            found[id(value)] = value
    return [g for g in found.values() if g is not torch.default_generator]


def _parts(value: object) -> Iterator[object]:
    """Parts that an object holds, as the garbage collector sees them."""
    if isinstance(value, types.FunctionType):  # its globals are all of a module's
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        yield from value.__closure__ or ()
        yield from (each for each in named if isinstance(each, GENERATORS) or _globals_of(each) is value.__globals__)
    elif not isinstance(value, dict | list | tuple | set | frozenset) or len(value) <= _MOST_ITEMS:
        yield from gc.get_referents(value)
        for kind in type(value).__mro__:
            if kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "typing", "abc"):
                yield from (method for method in vars(kind).values() if isinstance(method, types.FunctionType))


def _globals_of(value: object) -> object:
    return value.__globals__ if isinstance(value, types.FunctionType) else None
