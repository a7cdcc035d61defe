"""Rows of a map-style dataset: each process reads those of its own devices, in one order however many there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from torch_shard._common.caller import caller, public
from torch_shard._common.convert import flatten
from torch_shard._common.specs import describe_mesh
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_count, check_kind, is_integer
from torch_shard._device import HostRows
from torch_shard._fit.data import generators_of, reseed
from torch_shard._hosts import compare
from torch_shard._train import HostBatch, Step

_Key = tuple[int, int]
"""Epoch and index of a row."""

_DRAW_NOTHING = (TensorDataset, torch.Tensor, np.ndarray, list, tuple)
"""Kinds of datasets for whose rows generators need not be seeded, which takes 15 microseconds."""


class Rows:
    """Batches of a map-style dataset for `fit`, of which each process reads the rows of its own devices, and no others.

    `fit(step, state, dataset, batch_size=32, ...)` is `fit(step, state, Rows(dataset, batch_size=32), ...)`.

    The order of the rows follows from the seed of `fit` and the number of the epoch, and what `dataset[index]` draws at
    random from these and the index, in workers or not. So both are the same for any number of processes, and a run that
    is resumed by another number goes on with the rows that are next. (Where `collate_fn` draws, or a dataset reads many
    rows at once, they follow from the process's first or last row, and are others with other processes.)

    Args:
        dataset: With `len(dataset)` and `dataset[index]`, the same in every process. One that also reads many rows at
            once, by `__getitems__`, as those of Hugging Face do, is asked for them so.
        batch_size: Rows of a batch, over all processes.
        shuffle: Take the rows of each epoch in another order. False: as they are.
        drop_last: Leave out what is left at the end of an epoch when it fills no batch. False fills it up with the
            first rows of the epoch, as a `DistributedSampler` does; in an evaluation it is a smaller batch.
        num_workers: Processes that read ahead, as in a `DataLoader`; 0 reads in this one, while devices compute.
            They are started by forkserver, so what they are given must be picklable.
        collate_fn: Makes a batch of a list of rows; by default that of a `DataLoader`, which takes lists of numbers
            apart, so that these are refused. It is given the rows of one process, so it pads to a length that is the
            same in all.

    Raises:
        TypeError: An argument is of the wrong kind, or the dataset has no length.
        ValueError: An option has no such value, or the dataset has no rows.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> rows = ts.Rows(torch.randn(60, 4), batch_size=8, drop_last=True)
        >>> state = ts.fit(step, None, rows, steps=10, progress=False)  # an epoch and three batches of the next
    """

    @public
    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], PyTree] | None = None,
    ) -> None:
        check_dataset(dataset)
        check_count("batch_size", batch_size)
        check_kind("shuffle", shuffle, bool)
        check_kind("drop_last", drop_last, bool)
        if not is_integer(num_workers) or num_workers < 0:
            raise ValueError(f"{caller()}: num_workers must be an integer, 0 or more, got {num_workers!r}.")
        if collate_fn is not None:
            check_call("collate_fn", collate_fn, "rows")
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, batch_size, shuffle, drop_last
        self.num_workers, self.collate_fn = num_workers, collate_fn


def order_of(rows: Rows, seed: int, epoch: int) -> torch.Tensor:
    """Indices of the rows of an epoch, one after the other."""
    num = len(rows.dataset)
    if not rows.shuffle:
        return torch.arange(num)
    words = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    return torch.randperm(num, generator=torch.Generator().manual_seed(int(words[0] >> 1)))


def _reader(rows: Rows, keys: Iterable[list[_Key]], seed: int) -> DataLoader[PyTree]:
    """A batch of each of these lists of rows, whose random numbers follow from this seed."""
    return DataLoader(
        _Seeded(rows.dataset, seed),
        batch_sampler=keys,
        num_workers=rows.num_workers,
        collate_fn=rows.collate_fn or _collate,
        multiprocessing_context="forkserver" if rows.num_workers else None,
        persistent_workers=rows.num_workers > 0,
    )


def _collate(rows: list[Any]) -> PyTree:
    """A batch as a `DataLoader` makes it of rows; lists of numbers, which it takes apart by position, are refused."""
    if (place := _list_of_numbers(rows[0])) is not None:
        raise TypeError(
            f"{caller()}: {place} of a row is a list of numbers, as tokenizers give it, of which a DataLoader makes no "
            "tensor (rows, length) but a list of one tensor for each position. Where all are of one length, give "
            'tensors, dataset.with_format("torch"), or ts.Rows(dataset, batch_size=32, '
            "collate_fn=transformers.default_data_collator). Where not, pad them to one: "
            "collate_fn=transformers.DataCollatorWithPadding(tokenizer, padding='max_length', max_length=512)."
        )
    return default_collate(rows)


def _list_of_numbers(row: Any) -> str | None:
    """Where a row holds a list of numbers, or of such lists; a row that is itself a list is its parts."""
    parts = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, list | tuple) else ()
    for key, part in cast(Iterable[tuple[object, Any]], parts):
        first = part
        while isinstance(first, list) and first:
            first = cast(Any, first[0])
        if first is not part and isinstance(first, int | float):
            return repr(key)
    return None


class _Seeded(Dataset[Any]):
    """A dataset whose rows draw from (seed, epoch, index), whoever reads them, and in whatever order."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._held: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None}  # a worker has its own

    def __getitems__(self, keys: list[_Key]) -> list[Any]:
        if self._held is None:
            self._held = generators_of(self._dataset)
        reseed(self._held, self._seed, *keys[0])
        if _reads_many(self._dataset):
            return self._dataset.__getitems__([index for _, index in keys])
        if type(self._dataset) in _DRAW_NOTHING:
            return [self._dataset[index] for _, index in keys]
        return [self._row(epoch, index) for epoch, index in keys]

    def _row(self, epoch: int, index: int) -> Any:
        reseed(self._held or [], self._seed, epoch, index)
        return self._dataset[index]


def _reads_many(dataset: Any) -> bool:
    """Tell whether a dataset reads many rows at once by itself; torch's `Subset` offers it of any dataset."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def check_dataset(dataset: Any) -> None:
    """Refuse what is no map-style dataset with a length."""
    hint = "A dataset has len(dataset) and dataset[index]"
    if isinstance(dataset, DataLoader):
        raise TypeError(f"{caller()}: a DataLoader makes batches itself. Give its dataset, or leave batch_size out.")
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{caller()}: {type(dataset).__name__} is an IterableDataset, of which rows cannot be chosen. {hint}; for "
            "others, give a DataLoader without batch_size."
        )
    is_other = isinstance(dataset, Mapping | str | bytes | torch.nn.Module | type)
    if is_other or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{caller()}: {type(dataset).__name__} is no dataset. {hint}.")
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"{caller()}: {type(dataset).__name__} has no length. {hint}.") from error
    if not size:
        raise ValueError(f"{caller()}: the dataset has no rows.")


def evaluation_rows(loader: Any, batch_size: int | None, train: Any) -> Any:
    """What was given as `eval_loader`: a dataset as its `Rows`, anything else as it is.

    A list or a tensor may be of rows or of batches: its first item has as many dims as a row of the training data, or
    one more.

    Args:
        loader: What was given.
        batch_size: What was given for datasets.
        train: The training data, as `as_rows` gives it.
    """
    is_plain = isinstance(loader, Sequence | torch.Tensor) and len(loader) > 0
    if not is_plain or batch_size is None or not isinstance(train, Rows):
        return as_rows("eval_loader", loader, batch_size, shuffle=False)
    found, row = ([np.ndim(leaf) for leaf in flatten(data[0])[0]] for data in (loader, train.dataset))
    if found == row:
        return Rows(loader, batch_size=batch_size, shuffle=False)
    if found == [ndim + 1 for ndim in row]:
        return loader
    raise ValueError(
        f"{caller()}: eval_loader must have rows as the training data has them, or batches of such rows; found items "
        f"of {found} dims, where a row has {row}. Give Rows(data, batch_size={batch_size}, shuffle=False), or a "
        "DataLoader."
    )


def as_rows(argument: str, loader: Any, batch_size: int | None, *, shuffle: bool) -> Any:
    """What was given as a loader: a dataset as its `Rows`, anything else as it is.

    Raises:
        TypeError: It is no dataset, and there is a `batch_size` for it.
        ValueError: `batch_size` is missing, or is given twice.
    """
    if argument == "loader" and batch_size is not None:
        check_count("batch_size", batch_size)
        if isinstance(loader, Rows):
            raise ValueError(f"{caller()}: batch_size is given twice: the Rows have batch_size={loader.batch_size}.")
        check_dataset(loader)
    elif not isinstance(loader, Dataset) or isinstance(loader, Iterable):
        return loader
    elif batch_size is None:
        raise ValueError(
            f"{caller()}: {argument} is a dataset of rows, {type(loader).__name__}. Say how many make a batch, "
            "batch_size=32; or give a DataLoader."
        )
    return Rows(loader, batch_size=batch_size, shuffle=shuffle)


class TrainingRows:
    """A function from a position to the batches from there on, epoch after epoch, as long as they are asked for."""

    def __init__(self, rows: Rows, step: Step, *, seed: int) -> None:
        self._rows, self._seed, self._own = rows, seed, HostRows.of(step.layout)
        self._own.shard()  # or an error of its own
        size, num, parts = rows.batch_size, len(rows.dataset), step.options.accumulate_steps
        if size % (each := self._own.num_blocks * parts):
            raise ValueError(
                f"{caller()}: batch_size={size} is not a multiple of {each}: mesh {describe_mesh(step.mesh)} splits a "
                f"batch into {self._own.num_blocks} shards, each taken in accumulate_steps={parts}. Use "
                f"batch_size={max(size // each, 1) * each}."
            )
        if num < size:
            raise ValueError(f"{caller()}: the dataset has {num} rows, fewer than batch_size={size}.")
        self.per_epoch = num // size if rows.drop_last else -(-num // size)
        _compare(rows, seed)

    def __call__(self, position: int) -> Iterator[HostBatch]:
        """The batches after so many."""
        for batch in _reader(self._rows, self._keys(position), self._seed):
            yield HostBatch(batch, local=True)

    def _keys(self, position: int) -> Iterator[list[_Key]]:
        size, (first, begin) = self._rows.batch_size, divmod(position, self.per_epoch)
        for epoch in itertools.count(first):
            order = order_of(self._rows, self._seed, epoch)
            whole = torch.cat([order, order])[: self.per_epoch * size]
            for indices in whole.split(size)[begin if epoch == first else 0 :]:
                yield _own_keys(epoch, indices, self._own)


class EvaluationRows:
    """The batches of an evaluation, each time; what does not divide over the mesh is read whole by all processes."""

    def __init__(self, rows: Rows, step: Step) -> None:
        own = HostRows.of(step.layout)
        own.shard()  # or an error of its own
        _compare(rows, 0)
        parts = order_of(rows, 0, 0).split(rows.batch_size)
        if rows.drop_last and len(parts[-1]) < rows.batch_size:
            parts = parts[:-1]
        self._divides = [len(part) % own.num_blocks == 0 for part in parts]
        keys = [
            _own_keys(0, part, own) if divides else [(0, index) for index in part.tolist()]
            for part, divides in zip(parts, self._divides, strict=True)
        ]
        self._reader = _reader(rows, keys, seed=0)

    def __iter__(self) -> Iterator[HostBatch]:
        return itertools.starmap(HostBatch, zip(self._reader, self._divides, strict=True))


def _own_keys(epoch: int, indices: torch.Tensor, own: HostRows) -> list[_Key]:
    """The rows of a batch that this process reads."""
    return [(epoch, index) for span in own.of_whole(len(indices)) for index in indices[span.start : span.stop].tolist()]


def _compare(rows: Rows, seed: int) -> None:
    """Refuse what is not the same in all processes."""
    facts: dict[str, object] = {"len(dataset)": len(rows.dataset), "the seed of the order": seed}
    facts |= {name: getattr(rows, name) for name in ("batch_size", "shuffle", "drop_last")}
    advice = "Each process gives the whole dataset, the same as the others, and reads its own rows of it."
    compare("the dataset", facts, advice=lambda name: advice)
