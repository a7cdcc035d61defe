"""Sequences of different lengths in few shapes: padded to one of some lengths, or several documents in a row.

Shapes: B rows, T tokens of a batch as it comes, L of one as it is given on.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from torch_shard._common.caller import caller, public
from torch_shard._common.validate import check_count, check_kind

IGNORED = -100
"""The label that torch's cross entropy leaves out."""

Batch = Mapping[str, torch.Tensor]


class bucket:
    """Pad each batch of a loader to the first of some lengths that it fits, so that few shapes are compiled.

    Args:
        loader: Of dicts of tensors `(B, T, ...)`, such as a `DataLoader` with a collator of Hugging Face gives.
        lengths: The lengths; a longer batch is an error.
        pad: What tensors are padded with, by name; labels by -100, and all others by 0.
        dim: The dim of the sequence. Tensors of lower rank, and those with another size there, stay as they are.

    Attributes:
        seen: How many batches came in each length, and how long they were before: `{length: Counter of T}`.

    Raises:
        TypeError: A batch is not a dict of tensors.
        ValueError: There is no length, or one that is not positive; or a batch is longer than all.

    Example:
        >>> import torch, torch_shard as ts
        >>> rows = [{"input_ids": torch.ones(4, n, dtype=torch.int64)} for n in (5, 9, 6)]
        >>> loader = ts.bucket(rows, lengths=[8, 16], pad={"input_ids": 2})
        >>> [tuple(batch["input_ids"].shape) for batch in loader]
        [(4, 8), (4, 16), (4, 8)]
        >>> print(loader.table())
        length  batches  tokens that are no padding
        8             2                       68.8%
        16            1                       56.2%
    """

    @public
    def __init__(
        self, loader: Iterable[Batch], *, lengths: Sequence[int], pad: Mapping[str, Any] | None = None, dim: int = 1
    ) -> None:
        check_kind("loader", loader, Iterable)
        check_kind("lengths", lengths, list | tuple)
        if not lengths:
            raise ValueError(f"{caller()}: lengths must have one at least, such as [512, 1024, 2048].")
        for length in lengths:
            check_count("lengths", length)
        check_count("dim", dim)
        check_kind("pad", pad, Mapping | None, hint='By name, as in {"input_ids": tokenizer.pad_token_id}.')
        self._loader, self._lengths, self._dim = loader, sorted(lengths), dim
        self._pad = {"labels": IGNORED, **(pad or {})}
        self.seen: dict[int, collections.Counter[int]] = {}

    def __len__(self) -> int:
        return len(cast(Sequence[Batch], self._loader))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield self._padded(batch)

    def _padded(self, batch: Any) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            raise TypeError(f"bucket: a batch must be a dict of tensors by name, got {type(batch).__name__}.")
        held = cast(Mapping[str, Any], batch)
        sizes = {n: t.shape[self._dim] for n, t in held.items() if isinstance(t, torch.Tensor) and t.ndim > self._dim}
        if not sizes:
            raise TypeError(
                f"bucket: no tensor of the batch has a dim {self._dim}: it has {', '.join(map(str, held))}."
            )
        size = max(sizes.values())
        length = next((length for length in self._lengths if length >= size), None)
        if length is None:
            raise ValueError(
                f"bucket: a batch has {size} tokens in a row, more than the longest of lengths={self._lengths}. Add a "
                "length, or truncate in the tokenizer."
            )
        self.seen.setdefault(length, collections.Counter())[size] += 1
        return {n: self._longer(n, t, length) if sizes.get(n) == size else t for n, t in held.items()}

    def _longer(self, name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
        shape = [length if dim == self._dim else size for dim, size in enumerate(tensor.shape)]
        found = tensor.new_full(shape, self._pad.get(name, 0))
        found.narrow(self._dim, 0, tensor.shape[self._dim]).copy_(tensor)
        return found

    def table(self) -> str:
        """Show the lengths so far: batches, and how much of them was no padding."""
        lines = ["length  batches  tokens that are no padding"]
        for length, counts in sorted(self.seen.items()):
            full = sum(size * count for size, count in counts.items()) / (length * counts.total())
            lines.append(f"{length:<6}  {counts.total():>7}  {full:>26.1%}")
        return "\n".join(lines)


class pack:
    """Put several documents into each row, for decoders of Hugging Face: batches of one shape, almost without padding.

    Each batch has `input_ids`; `position_ids`, which begin anew with each document; `labels`, with -100 for padding and
    where a document begins, as its first token does not follow from the one before; and `use_cache`, False. By the
    positions a decoder of transformers lets no document see another, but only without a cache and an attention mask.

    Args:
        documents: Of token ids: 1-D tensors, arrays or lists, or dicts with `input_ids`.
        length: Of a row. A longer document is cut.
        batch_size: Rows of a batch.
        pad_token_id: Fills a row up, as a document of its own.
        drop_last: Leave out what does not fill a batch in the end; else it is filled up with padding.

    Attributes:
        num_tokens: So far, without padding.
        num_slots: So far, with padding.

    Raises:
        TypeError: A document is something else.
        ValueError: A number is not positive.

    Example:
        >>> import torch_shard as ts
        >>> batches = list(ts.pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], length=6, batch_size=2))
        >>> batches[0]["input_ids"].tolist()
        [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
        >>> batches[0]["labels"].tolist()
        [[-100, 2, 3, -100, 5, -100], [-100, 7, 8, 9, -100, -100]]
    """

    @public
    def __init__(
        self,
        documents: Iterable[Any],
        *,
        length: int,
        batch_size: int,
        pad_token_id: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_kind("documents", documents, Iterable)
        check_count("length", length)
        check_count("batch_size", batch_size)
        check_kind("drop_last", drop_last, bool)
        self._documents, self._length, self._batch_size = documents, length, batch_size
        self._pad, self._drop_last = pad_token_id, drop_last
        self.num_tokens = self.num_slots = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows: list[list[np.ndarray]] = []
        for row in self._rows():
            rows.append(row)
            if len(rows) == self._batch_size:
                yield self._batch(rows)
                rows = []
        if rows and not self._drop_last:
            yield self._batch(rows + [[]] * (self._batch_size - len(rows)))

    def _rows(self) -> Iterator[list[np.ndarray]]:
        row, left = list[np.ndarray](), self._length
        for document in self._documents:
            tokens = _tokens(document)
            for start in range(0, len(tokens), self._length):
                part = tokens[start : start + self._length]
                if len(part) > left:
                    yield row
                    row, left = [], self._length
                row.append(part)
                left -= len(part)
        if row:
            yield row

    def _batch(self, rows: list[list[np.ndarray]]) -> dict[str, Any]:
        shape = (self._batch_size, self._length)
        ids, labels = np.full(shape, self._pad, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for number, row in enumerate(rows):
            start = 0
            for part in row:
                stop = start + len(part)
                ids[number, start:stop], positions[number, start:stop] = part, np.arange(len(part))
                labels[number, start + 1 : stop] = part[1:]
                start = stop
            positions[number, start:] = np.arange(self._length - start)
            self.num_tokens += start
        self.num_slots += ids.size
        found = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {**{name: torch.from_numpy(array) for name, array in found.items()}, "use_cache": False}


def _tokens(document: Any) -> np.ndarray:
    given = document["input_ids"] if isinstance(document, Mapping) else document
    found = np.asarray(given)
    if found.ndim != 1 or not (np.issubdtype(found.dtype, np.integer) or not found.size):
        raise TypeError(f"pack: a document must be integers in one dim, got {found.dtype} {found.shape}.")
    return found
