"""The values of a state or a module as files that others read: safetensors, and torch.save."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import jax
import torch

from torch_shard._common.caller import caller, public
from torch_shard._common.convert import struct_of
from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.printed import replacing
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_count, check_directory, check_file, check_kind, check_path, unwrapped
from torch_shard._device import refuse_meta, to_cpu
from torch_shard._entries import group_ties, holdings, unsaved_buffers
from torch_shard._hosts import exchange
from torch_shard._io.formats import DTYPES, Stored
from torch_shard._sharding import Stacks
from torch_shard._state import TrainState, present_state

SHARD_BYTES = 5 * 10**9
"""Size of one file by default, as Hugging Face has it."""

logger = logging.getLogger(__name__)

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def split(stored: Mapping[str, Stored], max_shard_bytes: int) -> list[list[str]]:
    """Names by file, each file of at most so many bytes (or with one larger tensor).

    In a file the widest dtypes come first, so that each tensor starts at a multiple of its dtype's size.
    """
    if odd := [f"{name}: {entry.dtype}" for name, entry in stored.items() if entry.dtype not in _CODES]:
        raise ValueError(f"safetensors cannot hold {', '.join(odd)}. Convert them first.")
    files, room = [list[str]()], max_shard_bytes
    for name, entry in stored.items():
        size = _num_bytes(entry)
        if files[-1] and size > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(name)
        room -= size
    return [sorted(names, key=lambda name: -stored[name].dtype.itemsize) for names in files]


def result_of(path: Path, parts: list[list[str]]) -> Path:
    """The one file of an export, or the index of several.

    Args:
        path: A file `*.safetensors` (of several, each takes its stem), or a directory.
        parts: What `split` gives.
    """
    one = path if path.suffix == ".safetensors" else path / "model.safetensors"
    return one if len(parts) == 1 else one.with_name(f"{one.name}.index.json")


def write_safetensors(
    result: Path,
    stored: Mapping[str, Stored],
    parts: list[list[str]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> Path:
    """Write CPU tensors, which are let go one by one, in the order of `parts`.

    Several files get names that no older file has, and the index takes its place last; what it replaces is removed
    after that. So a failure leaves the old export as it was, whatever the moment.
    """
    one = result.with_name(result.name.removesuffix(".index.json"))
    index = one.with_name(f"{one.name}.index.json")
    one.parent.mkdir(parents=True, exist_ok=True)
    stale = {one, index, *_files_of(index)}
    files, rest = [one] if result == one else _new_files(one, len(parts)), iter(tensors)
    with contextlib.ExitStack() as stack:  # what was entered first is renamed last
        text = stack.enter_context(replacing(index)) if result == index else None
        for path, names in zip(files, parts, strict=True):
            with stack.enter_context(replacing(path)).open("wb") as out:
                _write(out, {name: stored[name] for name in names}, rest, metadata)
        if text is not None:
            found = {name: path.name for path, names in zip(files, parts, strict=True) for name in names}
            size = sum(map(_num_bytes, stored.values()))
            ordered = {name: found[name] for name in stored}
            text.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": ordered}, indent=2))
    for path in stale - {*files, result}:
        path.unlink(missing_ok=True)
    return result


def _new_files(one: Path, num: int) -> list[Path]:
    for attempt in itertools.count(1):
        stem = one.stem if attempt == 1 else f"{one.stem}-{attempt}"
        paths = [one.with_name(f"{stem}-{i:05}-of-{num:05}.safetensors") for i in range(1, num + 1)]
        if not any(path.exists() for path in paths):
            return paths
    raise AssertionError  # the count has no end


def _files_of(index: Path) -> list[Path]:
    """The files that an index names, if there is one."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        files = json.loads(index.read_text())["weight_map"].values()
        return [index.with_name(file) for file in files if Path(file).name == file]
    return []


def _num_bytes(entry: Stored) -> int:
    return entry.dtype.itemsize * torch.Size(entry.shape).numel()


def _write(
    out: BinaryIO, stored: Mapping[str, Stored], tensors: Iterator[torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """One file of safetensors: the length of the header, the header, the bytes.

    Written here, as the library's `save_file` wants all tensors at once, where a tensor on shards is to be whole on the
    host only for as long as it is written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
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
        if tensor.numel():
            out.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_torch(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write CPU tensors by `torch.save`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:  # torch's own writer has no OSError for what fails
        torch.save(dict(tensors), file)
    return path


@public
def export_safetensors(
    state: TrainState | torch.nn.Module | Mapping[str, PyTree],
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write weights as safetensors, in torch's names and layouts, as `from_pretrained` and `load_file` read them.

    A tensor at a time is whole on the host. The export takes the place of an older one when it is whole, and not
    before. Every process must call it; the first one writes.

    Args:
        state: A `TrainState`; a module on any device; or a mapping of names to tensors or arrays. Of a tie the first
            name is written, of buffers those that a `state_dict` has.
        path: A file `*.safetensors`, or a directory, in which it becomes `model.safetensors`.
        max_shard_bytes: What does not fit into one file of so many bytes is written as several, with an index:
            `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`.
        metadata: Strings for the header, beside `format: pt`.

    Returns:
        The path of the file, or of the index of several.

    Raises:
        TypeError: `state` is none of these, or the metadata are not strings.
        ValueError: A tensor has no values (on the meta device) or a dtype that safetensors lack; or the state was
            donated to a step.
        NotADirectoryError: `path` is a file of another kind.

    Example:
        >>> import tempfile, torch, torch_shard as ts
        >>> path = ts.export_safetensors(torch.nn.Linear(4, 2), tempfile.mkdtemp())
        >>> path.name
        'model.safetensors'
    """
    check_kind("metadata", metadata, Mapping | None)
    strings = {"format": "pt", **(metadata or {})}
    if not all(isinstance(text, str) for pair in strings.items() for text in pair):
        raise TypeError(f"export_safetensors: metadata must map strings to strings, got {metadata}.")
    check_count("max_shard_bytes", max_shard_bytes)
    path = check_path("path", path)
    path = check_file("path", path) if path.suffix == ".safetensors" else check_directory("path", path)
    values, structs = _collect(state)
    _warn_of_adapters(structs)
    stored = {name: Stored(tuple(s.shape), _dtype_of(state, name, s)) for name, s in structs.items()}
    parts = split(stored, max_shard_bytes)
    tensors = (to_cpu(values[name]).detach().to(stored[name].dtype) for names in parts for name in names)
    _write_once(lambda found: write_safetensors(result_of(path, parts), stored, parts, found, strings), tensors)
    return result_of(path, parts)


@public
def export_torch(state: TrainState | torch.nn.Module | Mapping[str, PyTree], path: str | os.PathLike[str]) -> Path:
    """Write weights as a state_dict by `torch.save`; the whole of them is on the host at once.

    Args:
        state: A `TrainState` (parameters and buffers, without the optimiser), a module on any device, or a mapping of
            names to tensors and arrays; global shapes are written, whatever the sharding.
        path: A file. It takes the place of an older one when it is whole.

    Returns:
        The path.

    Raises:
        TypeError: `state` is none of these, or its names are not strings.
        ValueError: A tensor has no values (on the meta device); or the state was donated to a step.

    Example:
        >>> import os, tempfile, torch, torch_shard as ts
        >>> path = ts.export_torch(torch.nn.Linear(4, 2), os.path.join(tempfile.mkdtemp(), "weights.pt"))
        >>> sorted(torch.load(path, weights_only=True))
        ['bias', 'weight']
    """
    path = check_file("path", path)
    values, structs = _collect(state)
    tensors = (to_cpu(values[name]).detach().to(_dtype_of(state, name, struct)) for name, struct in structs.items())
    _write_once(lambda found: write_torch(path, dict(zip(structs, found, strict=True))), tensors)
    return path


def _collect(
    state: TrainState | torch.nn.Module | Mapping[str, PyTree],
) -> tuple[Mapping[str, PyTree], dict[str, PyTree]]:
    """The values, and shape and dtype of those that are to be written: each tensor under one name."""
    if isinstance(state, torch.nn.Module):
        module = unwrapped(state)
        values, unsaved = holdings(module).all, unsaved_buffers(module)
    elif isinstance(state, TrainState):
        if state.step.is_deleted():
            raise ValueError(f"{caller()}: this state was donated to a step. Export what the step returned.")
        values, unsaved = present_state(state).tensors, state.unsaved
    elif isinstance(state, Mapping):
        values, unsaved = state, ()
    else:
        raise TypeError(f"{caller()}: expected a TrainState, a module or a mapping, got {type(state).__name__}.")
    odd = [repr(name) for name in values if not isinstance(name, str) or name == "__metadata__" or not _is_text(name)]
    if odd:
        raise TypeError(f"{caller()}: {', '.join(odd)} cannot be names in a file. Names must be other strings.")
    by_name = jax.tree.map(_struct, values) if isinstance(values, Stacks) else values
    structs = {name: _struct(value) for name, value in by_name.items()}
    odd = [f"{name} is a {type(v).__name__}" for name, v in structs.items() if not hasattr(v, "dtype")]
    if odd:
        raise TypeError(f"{caller()}: names must lead to tensors or arrays, but {', '.join(odd)}.")
    names = (group[0] for group in group_ties(structs, by_identity=False))
    written = {name: structs[name] for name in names if name not in unsaved}
    refuse_meta(written)
    odd = [f"{n} ({t.layout})" for n, t in written.items() if getattr(t, "layout", torch.strided) is not torch.strided]
    if odd:
        raise TypeError(f"{caller()}: files hold dense tensors, but not {', '.join(odd)}. Use .to_dense().")
    return values, written


def _warn_of_adapters(names: Iterable[str]) -> None:
    """Say of names that peft has given to what it wraps that only the same model, wrapped, has them."""
    adapter = next((name for name in names if ".lora_" in name), None)
    if adapter is not None:
        logger.warning(
            "export_safetensors: the names are those of peft around the model (%s): ts.load_safetensors reads them "
            "into a model that is wrapped likewise, but from_pretrained finds none of its own and begins with new "
            "weights. The adapter is written by model.save_pretrained(path), the whole model by "
            "ts.export_safetensors(step.export(state).merge_and_unload(), path).",
            adapter,
        )


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _struct(value: PyTree) -> PyTree:
    """An array's shape and dtype: what is a row of a stack need not be cut out for that."""
    return struct_of(value) if isinstance(value, jax.Array) else value


def _dtype_of(state: object, name: str, struct: PyTree) -> torch.dtype:
    """An entry's dtype in torch, where JAX may hold it in fewer bits."""
    if isinstance(state, TrainState) and name in state.wide:
        return torch.int64
    return struct.dtype if isinstance(struct.dtype, torch.dtype) else torch_dtype(struct.dtype)


def _write_once(write: Callable[[Iterator[torch.Tensor]], object], tensors: Iterator[torch.Tensor]) -> None:
    """Let the first process write; all of them go through the tensors, which gathers those on several processes."""

    def go_through() -> None:
        try:
            if jax.process_index() == 0:
                write(tensors)
        finally:
            if jax.process_count() > 1:
                for _ in tensors:
                    pass

    exchange(go_through)
