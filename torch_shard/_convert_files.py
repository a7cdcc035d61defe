"""Files of weights from one format to the other, a tensor at a time, without a model."""

import os
import zipfile
from pathlib import Path

from torch_shard._tensor_files import TensorFile
from torch_shard._tensor_writer import SHARD_BYTES, Export, write_torch
from torch_shard._weight_paths import SAFETENSORS, TORCH, open_safetensors, open_torch


def convert_weights(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, max_shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the tensors of a file anew: safetensors as what `torch.save` writes, and the other way round.

    Names, shapes, dtypes and bytes stay; each name of a tie is written.

    Args:
        source: A file, an index of many, or a directory with one of these.
        target: A file, whose suffix says which format it gets (`.safetensors`, or `.pt`, `.pth`, `.bin`); or a
            directory, for safetensors.
        max_shard_bytes: Of one file of safetensors, as for `export_safetensors`.

    Returns:
        The path of the file, or of the index of several.

    Raises:
        FileNotFoundError: There is no source.
        ValueError: The source is damaged or holds more than tensors by name, or it is not clear what is meant.
    """
    source, target = Path(source), Path(target)
    if target.suffix not in (*SAFETENSORS, *TORCH) and target.suffix and not target.is_dir():
        raise ValueError(
            f"convert: {target} must end in one of {', '.join((*SAFETENSORS, *TORCH))}, or be a directory."
        )
    file = open_weights(source)
    if target.suffix in TORCH:
        return write_torch(target, {name: file.tensor(name) for name in file.stored})
    export = Export(target, file.stored, max_shard_bytes, {"format": "pt"})
    return export.write(file.tensor(name) for name in export.names)


def open_weights(path: Path) -> TensorFile:
    """The tensors of a file, directory or index in either format.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: As `convert_weights`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
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
