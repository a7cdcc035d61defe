"""Tensors in files: what lies there, and each as a tensor whose bytes are read when they are touched."""

import dataclasses
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from torch_shard._common.caller import caller

DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F64": torch.float64, "C64": torch.complex64},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
"""Dtypes of the safetensors format."""

RUN_BYTES = 32 * 2**20
"""Bytes of a file that are mapped at once: until let go, what was read of them counts as memory of the process."""

Index = tuple[tuple[int, int], ...]
"""A part of a tensor: where it starts and stops in each dim."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in a file, before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFile(Protocol):
    """Tensors by name.

    Attributes:
        shown: The file, for messages.
        stored: What lies there, in the order of the file.
    """

    shown: str
    stored: dict[str, Stored]

    def tensor(self, name: str) -> torch.Tensor:
        """One of them; bytes are read when touched, and take memory while the tensor lives. It is not to be kept."""
        ...


class SafetensorsFile:
    """A file of safetensors.

    The library checks the file; its tensors are then mapped one by one (the library maps the whole file, and the pages
    that were read stay).
    """

    def __init__(self, path: Path) -> None:
        self.shown, self._path = str(path), path
        header, self._start = _read_header(path)
        lacking = [f"{name}: {fields['dtype']}" for name, fields in header.items() if fields["dtype"] not in DTYPES]
        if lacking:
            raise ValueError(f"{caller()}: {path} holds dtypes that torch has no tensors of: {', '.join(lacking)}.")
        self._last: tuple[str, torch.Tensor] | None = None
        spans = {name: fields["data_offsets"] for name, fields in header.items()}
        self._spans = dict(sorted(spans.items(), key=lambda item: item[1]))
        self.stored = {n: Stored(tuple(header[n]["shape"]), DTYPES[header[n]["dtype"]]) for n in self._spans}

    def tensor(self, name: str) -> torch.Tensor:
        """One of the tensors, mapped by itself; the last one stays so, unless it is large."""
        if self._last is None or self._last[0] != name:
            self._last = None
            tensor = self._map(name)
            if tensor.nbytes > RUN_BYTES:
                return tensor
            self._last = name, tensor
        return self._last[1]

    def _map(self, name: str) -> torch.Tensor:
        (begin, end), stored = self._spans[name], self.stored[name]
        if begin == end:
            return torch.empty(stored.shape, dtype=stored.dtype)
        mapped = np.memmap(self._path, np.uint8, "c", self._start + begin, (end - begin,))
        return torch.from_numpy(mapped).view(stored.dtype).view(stored.shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The fields by name, and where the bytes of the tensors start."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        if zipfile.is_zipfile(path):
            raise ValueError(
                f"{caller()}: {path} is no safetensors file, but one of torch.save. Read it by load_torch."
            ) from error
        raise ValueError(
            f"{caller()}: {path} is damaged, or no safetensors file: {error}{_describe_sizes(path)}."
        ) from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: fields for name, fields in header.items() if name != "__metadata__"}, 8 + size


def _describe_sizes(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(8)
    claim = f", and its first eight ask for a header of {int.from_bytes(first, 'little')}" if len(first) == 8 else ""
    return f" (the file has {path.stat().st_size} bytes{claim})"


class TorchFile:
    """A file of `torch.save`, mapped where its format allows that (since torch 1.6)."""

    def __init__(self, path: Path) -> None:
        self.shown, self._path = str(path), path
        self._is_mapped = zipfile.is_zipfile(path)
        self._tensors: Any = self._load()
        self._touched = 0
        self.stored = _stored(self._tensors, self.shown)

    def tensor(self, name: str) -> torch.Tensor:
        """One of the tensors; the file is mapped anew after so many bytes."""
        if self._is_mapped and self._touched > RUN_BYTES:
            self._tensors, self._touched = self._load(), 0
        tensor = self._tensors[name].detach()
        self._touched += min(tensor.nbytes, RUN_BYTES)
        return tensor

    def _load(self) -> Any:
        self._tensors = None  # unmaps the file
        return read_torch(self._path)


def read_torch(path: Path) -> Any:
    """What `torch.save` has written, on the CPU, mapped where its format allows that."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a pickle protocol that is refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"names {named[1]}" if named else "is pickled in another way than torch.save does"
        raise ValueError(
            f"{caller()}: {path} holds more than tensors and plain containers: it {what}. To rebuild that "
            "may run code from the file, so it is not read. Where you trust it, save its state_dict alone: "
            "torch.save(model.state_dict(), path), or as safetensors."
        ) from error
    except Exception as error:  # torch raises KeyError, EOFError, RuntimeError and more
        reason = str(error).partition("\n")[0][:300]
        raise ValueError(
            f"{caller()}: {path} is damaged, or no file of torch.save: {type(error).__name__} {reason}"
        ) from error


class HeldTensors:
    """A mapping of CPU tensors, read like a file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], shown: str = "the mapping") -> None:
        self.shown, self._tensors = shown, tensors
        self.stored = _stored(tensors, self.shown)

    def tensor(self, name: str) -> torch.Tensor:
        """One of the tensors."""
        return self._tensors[name].detach()


def _stored(tensors: Any, shown: str) -> dict[str, Stored]:
    """Shapes and dtypes of strided tensors by name; anything else is refused."""
    is_mapping = isinstance(tensors, Mapping)
    if not is_mapping or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in tensors.items()):
        held = ", ".join(f"{k!r}: {_describe(v)}" for k, v in tensors.items()) if is_mapping else _describe(tensors)
        nested = [key for key, value in tensors.items() if isinstance(value, Mapping)] if is_mapping else []
        remedy = f"the part that has the weights, perhaps [{nested[0]!r}]" if nested else "a state_dict"
        raise ValueError(
            f"{caller()}: {shown} must hold tensors by name, and nothing else. It holds {held[:1000]}. Read it with "
            f"torch.load(path, weights_only=True, mmap=True), and give load_torch {remedy} in place of the path."
        )
    odd = {
        n: t for n, t in tensors.items() if t.layout is not torch.strided or t.is_quantized or t.device.type != "cpu"
    }
    if odd:
        listed = ", ".join(f"{n} ({t.device}, {t.layout}, {t.dtype})" for n, t in odd.items())
        raise ValueError(
            f"{caller()}: {shown} must hold plain CPU tensors, but has {listed}. Convert them with .to_dense(), "
            ".dequantize() or .cpu()."
        )
    return {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _describe(value: object) -> str:
    return f"{type(value).__name__} of {len(value)} entries" if isinstance(value, Mapping) else type(value).__name__


def read_runs(file: TensorFile, name: str, part: Index) -> Iterator[tuple[slice, torch.Tensor]]:
    """A part of a tensor, a run of rows at a time, so that little of the file is mapped at once."""
    stored = file.stored[name]
    if not part:
        yield slice(None), file.tensor(name)
        return
    (first, last), rest = part[0], tuple(slice(*bounds) for bounds in part[1:])
    row_bytes = stored.dtype.itemsize * math.prod(stored.shape[1:])
    size = max(1, RUN_BYTES // max(1, row_bytes))
    for start in range(first, last, size):
        stop = min(start + size, last)
        yield slice(start - first, stop - first), file.tensor(name)[(slice(start, stop), *rest)]


def read_part(file: TensorFile, name: str, part: Index, dtype: torch.dtype) -> torch.Tensor:
    """A part of a tensor in a dtype, as a tensor of its own."""
    found = torch.empty([stop - start for start, stop in part], dtype=dtype)
    for rows, values in read_runs(file, name, part):
        (found[rows] if part else found).copy_(values)
    return found


SAFETENSORS, TORCH = (".safetensors",), (".bin", ".pt", ".pth")
"""Suffixes of files."""

SAFETENSORS_NAMES = ("model.safetensors", "model.safetensors.index.json")

TORCH_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Hugging Face's names of the one file, and of the index of many."""

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
    """The tensors of a file, directory or index of safetensors."""
    return _open(path, SafetensorsFile, SAFETENSORS_NAMES, SAFETENSORS)


def open_torch(path: Path) -> TensorFile:
    """Open files of `torch.save`."""
    return _open(path, TorchFile, TORCH_NAMES, TORCH)


def _open(
    path: Path, open_file: Callable[[Path], TensorFile], names: tuple[str, str], suffixes: tuple[str, ...]
) -> TensorFile:
    refuse_foreign(path)
    if path.is_dir():
        path = _choose(path, names, suffixes)
    if not path.is_file():
        raise FileNotFoundError(f"{caller()}: {path} does not exist.")
    return _open_index(path, open_file) if path.suffix == ".json" else open_file(path)


def refuse_foreign(path: Path) -> None:
    """Refuse checkpoints of other tools, with what converts them."""
    folder = path if path.is_dir() else path.parent
    parts = sorted(folder.glob("consolidated.[0-9][0-9].pth"))
    if path.suffix == ".distcp" or (path.is_dir() and (path / ".metadata").is_file()):
        raise ValueError(
            f"{caller()}: {path} is a distributed checkpoint of torch (DCP), which is in a file for each process. "
            f"Convert it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt"
        )
    if len(parts) > 1 and (path.is_dir() or path in parts):
        raise ValueError(
            f"{caller()}: {folder} holds {len(parts)} parts of Meta's, {parts[0].name} to {parts[-1].name}, each with "
            "a slice of every matrix. Convert them with convert_llama_weights_to_hf.py of transformers, or take the "
            "weights of the hub in safetensors."
        )


def _choose(folder: Path, names: tuple[str, str], suffixes: tuple[str, ...]) -> Path:
    """The file of a directory that is meant."""
    usual = [folder / name for name in names if (folder / name).is_file()]
    found = usual or sorted(p for p in folder.iterdir() if p.suffix in suffixes and p.is_file())
    parts = [p.name for p in found if _PART.search(p.stem)]
    if parts and not usual:
        raise FileNotFoundError(
            f"{caller()}: {folder} holds {', '.join(parts)}, which are parts of several, but not their index "
            f"{names[1]}. Fetch it, or export again."
        )
    if len(found) == 1:
        return found[0]
    wanted = " or ".join([*names, *("*" + suffix for suffix in suffixes)])
    if not found:
        raise FileNotFoundError(f"{caller()}: {folder} holds no {wanted}.")
    listed = ", ".join(p.name for p in found)
    raise ValueError(
        f"{caller()}: {folder} holds {listed}, and nothing says which is meant. Give the path of one file."
    )


def _open_index(path: Path, open_file: Callable[[Path], TensorFile]) -> TensorFile:
    names_of: dict[str, list[str]] = {}
    for name, file in _read_index(path).items():
        names_of.setdefault(file, []).append(name)
    missing = [file for file in names_of if not _is_file(path.parent / file)]
    if missing:
        raise FileNotFoundError(
            f"{caller()}: {path} names {', '.join(missing)}, which {path.parent} lacks. Fetch what is missing, or "
            "export it again."
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
        raise ValueError(f"{caller()}: {path} does not fit its files. Fetch them again.\n\n{listed}")
    return ManyFiles(str(path), list(files.values()))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # of a name that is too long
        return False


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())["weight_map"]
        files = set(found.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{caller()}: {path} is no index: it must be JSON with a "weight_map" from names to files. '
            f"{type(error).__name__}: {error}."
        ) from error
    outside = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    if outside or not files:
        shown = f"names {', '.join(map(repr, outside))}" if outside else "names no file"
        raise ValueError(f"{caller()}: {path} {shown}; an index names files beside it, without a folder.")
    return found
