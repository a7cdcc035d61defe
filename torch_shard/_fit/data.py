"""Batches of any loader: from any position on, in an order that seed and epoch decide, put on the mesh ahead."""

import collections
import contextlib
import hashlib
import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torch_shard._capture import find_generators
from torch_shard._common.caller import caller
from torch_shard._common.generators import state_of
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, is_integer
from torch_shard._device import HostRows
from torch_shard._train import ShardedBatch, Step

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
        before = list(map(state_of, self._all))
        for generator, state in zip(self._all, states, strict=True):
            _set_state(generator, state)
        return before


def reseed(held: Iterable[Any], *words: int) -> None:
    """Let the global generators and these go on from what follows from some numbers, and from nothing else."""
    seed = int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest()) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(held, 1):  # with the seed itself, one of torch would draw what the global does
        _set_state(generator, _fresh(generator, seed ^ number))


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


def generators_of(loader: Any) -> list[Any]:
    """The random generators that a loader holds: in attributes, closures and small containers, at any depth.

    Also those that its classes' methods and its functions name as globals. (Not those in long lists of data, nor what
    is made while batches are drawn.)
    """
    found = find_generators(loader, of_data=True)
    return [g for g in found if g is not torch.default_generator and not isinstance(g, np.random.BitGenerator)]


logger = logging.getLogger(__name__)


class Batches:
    """The batches of a loader, epoch after epoch, from a position on.

    Args:
        loader: An iterable that starts anew with each `iter`, such as a list or a `DataLoader`; an iterator, which can
            only be read on; or a function from a position to an iterable of the batches from there on.
        seed: Each epoch draws its random numbers (the shuffling of a `DataLoader`, augmentations) from this and its
            number; torch's, NumPy's and Python's global generators are left as they were, and those that the loader
            holds (see `generators_of`).
    """

    def __init__(self, loader: Any, *, seed: int) -> None:
        is_other = isinstance(loader, Mapping | str | bytes | torch.nn.Module)
        if is_other or not (isinstance(loader, Iterable) or callable(loader)):
            raise TypeError(
                f"{caller()}: a loader is an iterable of batches, or a function from a position to one, got "
                f"{type(loader).__name__}."
            )
        if not isinstance(loader, Iterable):
            check_call("the loader, a function,", loader, "position")
        self._seed = seed
        self._loader: Any = loader
        self._is_iterator = isinstance(loader, Iterator)
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            logger.warning(
                "%s: this DataLoader has in_order=False, so chance decides the order of its batches, and a resumed run "
                "may see some twice and others not at all.", caller(),
            )  # fmt: skip
        if getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0):
            logger.warning(
                "%s: the workers of this DataLoader persist, so random numbers that they draw depend on the epochs "
                "before, and a resumed run draws others. (The order of the batches is the same.)", caller(),
            )  # fmt: skip

    @property
    def per_epoch(self) -> int | None:
        """Number of batches of an epoch, where it is known."""
        return getattr(self._loader, "per_epoch", None) or reliable_len(self._loader)

    def starting_at(self, position: int) -> Iterator[PyTree]:
        """The batches from a position on, counted from 0 over all epochs; without end if the loader starts anew.

        Raises:
            ValueError: The loader has no batches, has another number of them than it says, or is an iterator and the
                position is not where it begins.
        """
        if not self._is_iterator and isinstance(self._loader, Iterable):
            return self._epochs(position)
        if self._is_iterator and position > 0:
            raise ValueError(
                f"{caller()}: the state has seen {position} batches, and an iterator cannot be brought to where "
                "it was then. Pass what starts anew with each iter (a list, a DataLoader), or a function from a "
                "position to an iterable: lambda position: batches_from(position)."
            )
        loader: Any = self._loader
        found = loader if self._is_iterator else loader(position)
        if not isinstance(found, Iterable):
            raise TypeError(
                f"{caller()}: the loader, a function, must return an iterable of batches, got "
                f"{type(found).__name__} at position {position}."
            )
        return self._to_its_end(found)

    def _to_its_end(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        yield from self.epoch(0, batches)
        raise ValueError(
            f"{caller()}: the loader ended before the run did. Let it go on, or pass what starts anew with each "
            "iter (a list, a DataLoader), which is taken epoch after epoch."
        )

    def _epochs(self, position: int) -> Iterator[PyTree]:
        first, skipped = divmod(position, size) if (size := reliable_len(self._loader)) else (0, position)
        for number in itertools.count(first):
            count = 0
            for batch in self.epoch(number):
                count += 1
                if skipped:
                    skipped -= 1
                else:
                    yield batch
            if not count:
                raise ValueError(f"{caller()}: the loader has no batches (drop_last=True, and too few rows?).")
            if size and count != size:
                raise ValueError(f"{caller()}: the loader has {count} batches, but len() says {size}.")

    def first(self) -> PyTree | None:
        """The first batch; None where there is none, or an iterator would lose it."""
        return None if self._is_iterator else next(self.epoch(0), None)

    def epoch(self, number: int, loader: Any = None) -> Iterator[PyTree]:
        """The batches of one epoch."""
        # Those that a function or an iterator holds are its own: it cannot be begun anew.
        held = generators_of(self._loader) if loader is None else []
        streams = Streams(held, np.random.SeedSequence([self._seed, number]))
        with streams:
            if getattr(self._loader, "_iterator", None) is not None:  # workers that persist
                # What a DataLoader draws before the order of the batches, but not where its workers persist.
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            for owner in parts_of(self._loader):
                if callable(set_epoch := getattr(owner, "set_epoch", None)):
                    set_epoch(number)
            batches = iter(self._loader if loader is None else loader)
        try:
            while True:
                with streams:
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                yield batch
        finally:
            del batches  # workers end with it


def reliable_len(loader: Any) -> int | None:
    """Number of batches of an epoch; None where that is unknown, or an estimate."""
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def parts_of(loader: Any) -> list[object]:
    """Parts that may hold an epoch's number, or choose rows."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    parts = [loader, *samplers, getattr(loader, "dataset", None)]
    return list({id(part): part for part in parts if part is not None}.values())


_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""Of a `DistributedSampler` and all that copy it; of accelerate's `BatchSamplerShard`."""


def check_samplers(argument: str, loader: Any, step: Step) -> None:
    """Refuse a loader with a sampler that takes another shard of the data than the step does."""
    others = (
        "; or give fit the dataset itself, of which each process then reads its own rows: fit(step, state, dataset, "
        "batch_size=...)."
    )
    for part, names in itertools.product(parts_of(loader), _NAMES):
        found: Any = tuple(getattr(part, name, None) for name in names)
        if not all(map(is_integer, found)):
            continue
        said = f"the {type(part).__name__} of {argument} has {names[0]}={found[0]}, {names[1]}={found[1]}"
        if not step.options.local_batches and found[0] > 1:
            raise ValueError(
                f"{caller()}: {said}, so that each process would give other rows, but without local_batches each gives "
                "whole batches, the same as the others. make_train_step(..., local_batches=True), and num_replicas, "
                f"rank = data_shard(mesh); or use a sampler of the whole data{others}"
            )
        if step.options.local_batches and found != (shard := HostRows.of(step.layout).shard()):
            raise ValueError(
                f"{caller()}: {said}, but data_shard(mesh) is {shard}, as devices split the batch. Use num_replicas, "
                f"rank = data_shard(mesh){others}"
            )


class Ahead:
    """An iterator that keeps some batches on the mesh before they are asked for."""

    def __init__(self, batches: Iterator[PyTree], step: Step, size: int, limit: int) -> None:
        self._batches, self._step, self._size, self._left = batches, step, size, limit
        self._ready: collections.deque[ShardedBatch] = collections.deque()
        self._error: Exception | None = None

    def fill(self) -> None:
        """Draw what is missing. An error or the end shows when the batches before it have been taken."""
        while len(self._ready) < self._size and self._left and self._error is None:
            self._left -= 1
            try:
                self._ready.append(self._step.put(next(self._batches)))
            except Exception as error:
                self._error = error

    def __next__(self) -> ShardedBatch:
        if not self._ready:
            self.fill()
        if not self._ready and self._error is not None:
            raise self._error
        return self._ready.popleft()

    @property
    def num_ready(self) -> int:
        """Number of batches on the mesh."""
        return len(self._ready)

    def failed(self) -> Exception | None:
        """The error of a batch that is still ahead, so that other processes can still stop before it."""
        return self._error if jax.process_count() > 1 else None

    def close(self) -> None:
        """Let go of batches and workers."""
        self._ready.clear()
        with contextlib.suppress(AttributeError):
            self._batches.close()  # pyright: ignore[reportAttributeAccessIssue]
