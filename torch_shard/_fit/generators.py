"""Random numbers of one epoch: of the global generators, and of those that a loader holds."""

import functools
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


class Streams:
    """Within a `with`, the generators go on where the last one left off; outside they are as they were.

    Args:
        held: Generators of the loader.
        seed: Of all of them.
    """

    def __init__(self, held: list[Any], seed: np.random.SeedSequence) -> None:
        self._torches = [torch.default_generator, *(g for g in held if isinstance(g, torch.Generator))]
        self._others = [g for g in held if not isinstance(g, torch.Generator)]
        words = seed.generate_state(4)
        self._inside: list[Any] = [
            random.Random(int(words[0])).getstate(),
            np.random.RandomState(words[1:2]).get_state(),
            *(torch.Generator().manual_seed(int(words[2]) + i).get_state() for i in range(len(self._torches))),
            *(_fresh(g, int(words[3]) + i) for i, g in enumerate(self._others)),
        ]
        self._outside: list[Any] = []

    def _read(self) -> list[Any]:
        own = [_state(g) for g in self._others]
        return [random.getstate(), np.random.get_state(), *(g.get_state() for g in self._torches), *own]

    def _write(self, states: list[Any]) -> None:
        python, numpy, *rest = states
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(self._torches, rest, strict=False):
            generator.set_state(state)
        for generator, state in zip(self._others, rest[len(self._torches) :], strict=True):
            _set_state(generator, state)

    def __enter__(self) -> None:
        self._outside = self._read()
        self._write(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._read()
        self._write(self._outside)


def reseed(held: Iterable[Any], *words: int) -> None:
    """Let the global generators and these go on from what follows from some numbers, and from nothing else."""
    seed = int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest()) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(held):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed ^ number)
        else:
            _set_state(generator, _fresh(generator, seed ^ number))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _fresh(generator: Any, seed: int) -> Any:
    """The state of a generator of this kind from a seed."""
    if isinstance(generator, random.Random):
        return random.Random(seed).getstate()
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
    fresh = type(bits)(seed)
    return fresh.state if isinstance(generator, np.random.Generator) else np.random.RandomState(fresh).get_state()


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
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):
                found[id(value)] = value
        else:
            waiting += reversed(list(_parts(value)))
    return [g for g in found.values() if g is not torch.default_generator]


def _parts(value: object) -> Iterator[object]:
    """Parts that an object holds."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    else:
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            if kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "typing", "abc"):
                yield from (method for method in vars(kind).values() if isinstance(method, types.FunctionType))


def _parts_of_function(function: types.FunctionType) -> Iterator[object]:
    """Values that it closes over, and of its globals the generators and the functions of the same module."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for value in (function.__globals__.get(name) for name in function.__code__.co_names):
        is_near = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        if isinstance(value, GENERATORS) or is_near:
            yield value
