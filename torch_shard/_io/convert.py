"""Weights and checkpoints without a model: from one format to the other, a tensor at a time, and as a table."""

import functools
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.convert import host_array, to_host
from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.validate import check_path
from torch_shard._io.checkpointer import Checkpointer
from torch_shard._io.export import SHARD_BYTES, result_of, split, write_safetensors, write_torch
from torch_shard._io.formats import SAFETENSORS, TORCH, Stored, TensorFile, open_safetensors, open_torch
from torch_shard._io.integrity import find_damage
from torch_shard._io.manifest import (
    HEAD,
    TENSORS,
    Head,
    SavedArray,
    find_steps,
    make_orbax,
    read_arrays,
    read_head,
    step_path,
)
from torch_shard._state import TrainState

FORMATS = ("safetensors", "torch", "checkpoint")


@error_prefix("convert")
def convert_weights(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the tensors of a file anew, in another format or the same.

    Names, shapes, dtypes and bytes stay; each name of a tie is written that the source has. Of a checkpoint, parameters
    and those buffers are taken that a `state_dict` has.

    Args:
        source: A file, an index of many, or a directory with one of these; a checkpoint, or a directory of them, of
            which the newest is taken.
        target: A file, or for safetensors and checkpoints a directory.
        to: `safetensors`, `torch` or `checkpoint`; by default what the suffix of `target` says (`.safetensors`, or
            `.pt`, `.pth`, `.bin`), and safetensors for a directory.
        max_shard_bytes: Of one file of safetensors, as for `export_safetensors`.
    """
    source, target = check_path("SRC", source), check_path("DST", target)
    to = to or _format_of(target)
    file = open_weights(source)
    if to == "torch":
        return write_torch(target, {name: file.tensor(name) for name in file.stored})
    if to == "checkpoint":
        return write_checkpoint(target, {name: file.tensor(name) for name in file.stored})
    parts = split(file.stored, max_shard_bytes)
    tensors = (file.tensor(name) for names in parts for name in names)
    return write_safetensors(result_of(target, parts), file.stored, parts, tensors, {"format": "pt"})


def _format_of(target: Path) -> str:
    if target.suffix not in (*SAFETENSORS, *TORCH) and target.suffix and not target.is_dir():
        raise ValueError(
            f"{caller()}: {target} must end in one of {', '.join((*SAFETENSORS, *TORCH))}, or be a directory."
        )
    return "torch" if target.suffix in TORCH else "safetensors"


def open_weights(path: Path) -> TensorFile:
    """The tensors of a file, directory, index or checkpoint.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: As `convert_weights`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{caller()}: {path} does not exist.")
    if path.is_dir() and holds_checkpoint(path):
        return _checkpoint_file(path)
    return open_safetensors(path) if _is_safetensors(path) else open_torch(path)


def _is_safetensors(path: Path) -> bool:
    if path.is_dir():
        suffixes = {p.suffix for p in path.iterdir() if p.is_file()}
        if suffixes.isdisjoint((*SAFETENSORS, *TORCH)):
            raise FileNotFoundError(
                f"{caller()}: {path} holds no weights: no {', '.join('*' + s for s in (*SAFETENSORS, *TORCH))}."
            )
        if not suffixes.isdisjoint(SAFETENSORS) and not suffixes.isdisjoint(TORCH):
            raise ValueError(f"{caller()}: {path} holds files of both formats. Give the path of one file.")
        return not suffixes.isdisjoint(SAFETENSORS)
    if path.suffix == ".json":
        return ".safetensors" in path.name
    if path.suffix in (*SAFETENSORS, *TORCH):
        return path.suffix in SAFETENSORS
    with path.open("rb") as file:  # the header starts after eight bytes
        return not zipfile.is_zipfile(path) and file.read(9)[8:] == b"{"


def _checkpoint_file(path: Path) -> TensorFile:
    """Parameters and buffers of a checkpoint, those that a `state_dict` has; a tie under one name."""
    path = find_checkpoint(path).absolute()  # as orbax asks
    if damage := find_damage(path):
        raise ValueError(f"{caller()}: {path} is damaged: {'; '.join(damage)}.")
    head, orbax = read_head(path), make_orbax()
    tensors = [stored for stored in head.stored if stored.where == TENSORS]
    homes = {name: stored for stored in tensors for name in stored.names if name not in head.unsaved}
    types = {name: home.entry_type for name, home in homes.items()}
    stored = {
        name: Stored(shape, torch.int64 if name in head.wide else torch_dtype(np.dtype(dtype)))
        for name, (shape, dtype) in types.items()
    }

    @functools.lru_cache(1)  # a stack is read once for all of its rows
    def read(home: SavedArray) -> jax.Array:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        return read_arrays(orbax, path, {home: jax.ShapeDtypeStruct(home.shape, home.dtype, sharding=device)})[home]

    def tensor(name: str) -> torch.Tensor:
        home = homes[name]
        array = read(home)
        return to_host(array[home.names.index(name)] if len(home.names) > 1 else array).to(stored[name].dtype)

    return TensorFile(str(path), stored, tensor)


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write tensors as the checkpoint of a run at its beginning, from which `restore(params_only=True)` takes them."""
    with Checkpointer(directory, asynchronous=False) as checkpointer:
        if checkpointer.steps():
            raise FileExistsError(
                f"{caller()}: {directory} holds checkpoints of steps {checkpointer.steps()}. Name another one."
            )
        zero = jnp.zeros((), jnp.int32)
        params = {name: jnp.asarray(host_array(tensor)) for name, tensor in tensors.items()}
        wide = tuple(name for name, tensor in tensors.items() if tensor.dtype is torch.int64)
        state = TrainState(zero, params, {}, {}, (), jax.random.key(0), zero, wide=wide)
        checkpointer.save(state)
        return checkpointer.path(0)


def holds_checkpoint(path: Path) -> bool:
    """Tell whether it is a checkpoint, or a directory of them."""
    return (path / HEAD).exists() or bool(find_steps(path))


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest of a directory of them."""
    if (path / HEAD).exists():
        return path
    if not (steps := find_steps(path)):
        below = sorted({found.parent.parent for found in path.glob(f"*/step_*/{HEAD}")})
        there = f" Below it are some: {', '.join(map(str, below))}." if below else ""
        raise FileNotFoundError(
            f"{path} is not a checkpoint and holds none (directories such as step_00000100).{there}"
        )
    return step_path(path, steps[-1])


def inventory(path: Path) -> Group:
    """Contents of a checkpoint, for people."""
    head = read_head(path)
    size = decimal(sum(stored.num_bytes for stored in head.stored))
    metrics = "".join(f", {name} {value:.6g}" for name, value in head.metrics.items())
    axes = ", ".join(f"{axis}={size}" for axis, size in head.mesh.items())
    summary = f"{path}: step {head.step}, {head.num_batches} batches seen, {size}{metrics}, on mesh ({axes})"
    table = Table()
    for heading in ("name", "kind", "shape", "dtype", "spec", "bytes", "stored"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "bytes" else "left")
    for row in _rows(head):
        table.add_row(*(Text(str(cell)) for cell in row))
    return Group(Text(summary), table)


def _rows(head: Head) -> Iterator[tuple[object, ...]]:
    """A row for each parameter and buffer, and one for each place in the rest of the state."""
    rest: dict[str, list[SavedArray]] = {}
    for stored in head.stored:
        if stored.where != TENSORS:
            rest.setdefault(stored.where, []).append(stored)
            continue
        (shape, dtype), count = stored.entry_type, len(stored.names)
        for number, name in enumerate(stored.names):
            kind = f"{stored.kind}, not in state_dict" if name in head.unsaved else stored.kind
            place = f"row {number} of {count}" if count > 1 else ""
            yield name, kind, shape, dtype, stored.spec, decimal(stored.num_bytes // count), place
    for where, several in rest.items():
        count, size = sum(len(stored.names) for stored in several), sum(stored.num_bytes for stored in several)
        dtypes = ", ".join(dict.fromkeys(stored.dtype for stored in several))
        shape = "by name" if count else several[0].shape
        yield where, f"{count} entries" if count else "", shape, dtypes, "", decimal(size), ""
