"""From a path to the tensors behind it: one file, a directory, or an index of many files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

from torch_shard._tensor_files import SafetensorsFile, Stored, TensorFile, TorchFile

SAFETENSORS, TORCH = (".safetensors",), (".bin", ".pt", ".pth")
"""Suffixes of files."""
SAFETENSORS_NAMES = ("model.safetensors", "model.safetensors.index.json")
TORCH_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""What Hugging Face calls the one file, and the index of many."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class ManyFiles:
    """The tensors of several files as those of one.

    Attributes:
        shown: For messages.
        stored: As in `TensorFile`.
    """

    def __init__(self, shown: str, files: list[TensorFile]) -> None:
        self.shown = shown
        self._files = {name: file for file in files for name in file.stored}
        self.stored: dict[str, Stored] = {name: file.stored[name] for name, file in self._files.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One of the tensors."""
        return self._files[name].tensor(name)


def open_safetensors(path: Path) -> TensorFile:
    """The tensors of a file, directory or index of safetensors.

    Raises:
        FileNotFoundError: There is no such file, or a directory holds none.
        ValueError: A file is damaged, or it is not clear which is meant.
    """
    return _open(path, SafetensorsFile, SAFETENSORS_NAMES, SAFETENSORS)


def open_torch(path: Path) -> TensorFile:
    """Likewise, of files of `torch.save`."""
    return _open(path, TorchFile, TORCH_NAMES, TORCH)


def _open(
    path: Path, open_file: Callable[[Path], TensorFile], names: tuple[str, str], suffixes: tuple[str, ...]
) -> TensorFile:
    if path.is_dir():
        path = _choose(path, names, suffixes)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    return _open_index(path, open_file) if path.suffix == ".json" else open_file(path)


def _choose(folder: Path, names: tuple[str, str], suffixes: tuple[str, ...]) -> Path:
    """The file of a directory that is meant."""
    usual = [folder / name for name in names if (folder / name).is_file()]
    found = usual or sorted(p for p in folder.iterdir() if p.suffix in suffixes and p.is_file())
    parts = [p.name for p in found if _PART.search(p.stem)]
    if parts and not usual:
        raise FileNotFoundError(
            f"{folder} holds {', '.join(parts)}, which are parts of several, but not their index {names[1]}. Fetch it, "
            "or export again."
        )
    if len(found) == 1:
        return found[0]
    wanted = " or ".join([*names, *("*" + suffix for suffix in suffixes)])
    if not found:
        raise FileNotFoundError(f"{folder} holds no {wanted}.")
    listed = ", ".join(p.name for p in found)
    raise ValueError(f"{folder} holds {listed}, and nothing says which is meant. Give the path of one file.")


def _open_index(path: Path, open_file: Callable[[Path], TensorFile]) -> TensorFile:
    names_of: dict[str, list[str]] = {}
    for name, file in _read_index(path).items():
        names_of.setdefault(file, []).append(name)
    missing = [file for file in names_of if not (path.parent / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path} names {', '.join(missing)}, which {path.parent} lacks. Fetch what is missing, or export it again."
        )
    files = {file: open_file(path.parent / file) for file in sorted(names_of)}
    faults = [
        f"{name}: {path.name} says that it is in {file}, which lacks it"
        for file, names in names_of.items()
        for name in names
        if name not in files[file].stored
    ]
    first: dict[str, str] = {}
    for file, opened in files.items():  # what the index leaves out is there too, and shows where it is not wanted
        both = [name for name in opened.stored if first.setdefault(name, file) != file]
        faults += [f"{name}: it is in {first[name]} and in {file}" for name in both]
    if faults:
        listed = "\n".join(f"  {fault}." for fault in faults)
        raise ValueError(f"{path} does not fit its files. Fetch them again.\n\n{listed}")
    return ManyFiles(str(path), list(files.values()))


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())["weight_map"]
        files = set(found.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} is no index: it must be JSON with a "weight_map" from names to files. {type(error).__name__}: '
            f"{error}."
        ) from error
    outside = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    if outside or not files:
        shown = f"names {', '.join(map(repr, outside))}" if outside else "names no file"
        raise ValueError(f"{path} {shown}; an index names files beside it, without a folder.")
    return found
