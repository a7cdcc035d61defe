"""Tensors into files of safetensors, one at a time, in a way that an older export stays whole until the new one is."""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from torch_shard._common.files import replacing
from torch_shard._tensor_files import DTYPES, Stored

SHARD_BYTES = 5 * 10**9
"""Of one file, by default: as Hugging Face has it."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def split(stored: Mapping[str, Stored], max_shard_bytes: int) -> list[list[str]]:
    """Names by file, each file of at most so many bytes (or with one larger tensor).

    In a file the widest dtypes come first, so that each tensor starts at a multiple of its dtype's size.
    """
    files, room = [list[str]()], max_shard_bytes
    for name, entry in stored.items():
        size = _num_bytes(entry)
        if files[-1] and size > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(name)
        room -= size
    return [sorted(names, key=lambda name: -stored[name].dtype.itemsize) for names in files]


class Export:
    """Where an export goes: one file, or several with an index beside them.

    Attributes:
        result: The one file, or the index.
        parts: The names in each file, in the order in which `write` takes them.

    Args:
        path: A file `*.safetensors` (of several, each takes its stem), or a directory.
        stored: What will be written.
        max_shard_bytes: Of one file.
        metadata: Strings for the header of each file.

    Raises:
        ValueError: safetensors have no such dtype; all are listed.
    """

    def __init__(
        self, path: Path, stored: Mapping[str, Stored], max_shard_bytes: int, metadata: dict[str, str]
    ) -> None:
        odd = [f"{name}: {entry.dtype}" for name, entry in stored.items() if entry.dtype not in _CODES]
        if odd:
            raise ValueError(f"safetensors cannot hold {', '.join(odd)}. Convert them first.")
        is_file = path.suffix == ".safetensors"
        self._folder, self._stem = (path.parent, path.stem) if is_file else (path, "model")
        self._stored, self._metadata = stored, metadata
        self._one, self._index = (self._folder / f"{self._stem}.safetensors{end}" for end in ("", ".index.json"))
        self.parts = split(stored, max_shard_bytes)
        self.result = self._one if len(self.parts) == 1 else self._index

    @property
    def names(self) -> list[str]:
        """All names, in the order in which `write` takes them."""
        return [name for names in self.parts for name in names]

    def write(self, tensors: Iterable[torch.Tensor]) -> Path:
        """Write CPU tensors, which are let go one by one, in the order of `names`.

        Several files get names that no older file has, and the index takes its place last; what it replaces is removed
        after that. So a failure leaves the old export as it was, whatever the moment.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        stale = self._older()
        files, rest = self._paths(), iter(tensors)
        with contextlib.ExitStack() as stack:  # what was entered first is renamed last
            index = stack.enter_context(replacing(self._index)) if len(files) > 1 else None
            for path, names in zip(files, self.parts, strict=True):
                with stack.enter_context(replacing(path)).open("wb") as out:
                    _write(out, {name: self._stored[name] for name in names}, rest, self._metadata)
            if index is not None:
                index.write_text(self._index_text(files))
        for path in stale - {*files, self.result}:
            path.unlink(missing_ok=True)
        return self.result

    def _paths(self) -> list[Path]:
        num = len(self.parts)
        if num == 1:
            return [self._one]
        for attempt in itertools.count(1):
            stem = self._stem if attempt == 1 else f"{self._stem}-{attempt}"
            paths = [self._folder / f"{stem}-{i:05}-of-{num:05}.safetensors" for i in range(1, num + 1)]
            if not any(path.exists() for path in paths):
                return paths
        raise AssertionError  # the count has no end

    def _index_text(self, files: list[Path]) -> str:
        size = sum(map(_num_bytes, self._stored.values()))
        found = {name: path.name for path, names in zip(files, self.parts, strict=True) for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": {name: found[name] for name in self._stored}}
        return json.dumps(index, indent=2)

    def _older(self) -> set[Path]:
        """The files of an export that this one replaces."""
        found = {self._one, self._index}
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            files = json.loads(self._index.read_text())["weight_map"].values()
            found |= {self._folder / file for file in files if Path(file).name == file}
        return found


def _num_bytes(entry: Stored) -> int:
    return entry.dtype.itemsize * torch.Size(entry.shape).numel()


def _write(
    out: BinaryIO, stored: Mapping[str, Stored], tensors: Iterator[torch.Tensor], metadata: dict[str, str]
) -> None:
    """One file of safetensors: the length of the header, the header, the bytes.

    Written here, as the library's `save_file` wants all tensors at once, where a tensor on shards is to be whole on the
    host only for as long as it is written.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for name, entry in stored.items():
        stop = start + _num_bytes(entry)
        header[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    out.write(len(text).to_bytes(8, "little") + text)
    for name, entry in stored.items():
        tensor = next(tensors)
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), name
        out.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_torch(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write CPU tensors by `torch.save`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:  # torch's own writer has no OSError for what fails
        torch.save(dict(tensors), file)
    return path
