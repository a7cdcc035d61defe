"""Files of weights from one format to the other, a tensor at a time, without a model."""

import os
import zipfile
from pathlib import Path

from torch_shard._checkpoint_files import CheckpointTensors, write_checkpoint
from torch_shard._inventory import holds_checkpoint
from torch_shard._tensor_files import TensorFile
from torch_shard._tensor_writer import SHARD_BYTES, Export, write_torch
from torch_shard._weight_paths import SAFETENSORS, TORCH, open_safetensors, open_torch

FORMATS = ("safetensors", "torch", "checkpoint")


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

    Returns:
        The path of the file, of the index of several, or of the checkpoint.

    Raises:
        FileNotFoundError: There is no source.
        FileExistsError: There are checkpoints where one is to be written.
        ValueError: The source is damaged or holds more than tensors by name, or it is not clear what is meant.
    """
    source, target = Path(source), Path(target)
    to = to or _format_of(target)
    file = open_weights(source)
    if to == "torch":
        return write_torch(target, {name: file.tensor(name) for name in file.stored})
    if to == "checkpoint":
        return write_checkpoint(target, {name: file.tensor(name) for name in file.stored})
    export = Export(target, file.stored, max_shard_bytes, {"format": "pt"})
    return export.write(file.tensor(name) for name in export.names)


def _format_of(target: Path) -> str:
    if target.suffix not in (*SAFETENSORS, *TORCH) and target.suffix and not target.is_dir():
        raise ValueError(
            f"convert: {target} must end in one of {', '.join((*SAFETENSORS, *TORCH))}, or be a directory."
        )
    return "torch" if target.suffix in TORCH else "safetensors"


def open_weights(path: Path) -> TensorFile:
    """The tensors of a file, directory, index or checkpoint.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: As `convert_weights`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if path.is_dir() and holds_checkpoint(path):
        return CheckpointTensors(path)
    return open_safetensors(path) if _is_safetensors(path) else open_torch(path)


def _is_safetensors(path: Path) -> bool:
    if path.is_dir():
        suffixes = {p.suffix for p in path.iterdir() if p.is_file()}
        if suffixes.isdisjoint((*SAFETENSORS, *TORCH)):
            raise FileNotFoundError(
                f"{path} holds no weights: no {', '.join('*' + s for s in (*SAFETENSORS, *TORCH))}."
            )
        if not suffixes.isdisjoint(SAFETENSORS) and not suffixes.isdisjoint(TORCH):
            raise ValueError(f"{path} holds files of both formats. Give the path of one file.")
        return not suffixes.isdisjoint(SAFETENSORS)
    if path.suffix == ".json":
        return ".safetensors" in path.name
    if path.suffix in (*SAFETENSORS, *TORCH):
        return path.suffix in SAFETENSORS
    with path.open("rb") as file:  # the header starts after eight bytes
        return not zipfile.is_zipfile(path) and file.read(9)[8:] == b"{"
