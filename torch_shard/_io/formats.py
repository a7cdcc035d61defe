"""Tensors in files: what lies there, and each as a tensor whose bytes are read when they are touched."""

import dataclasses
import json
import math
import os.path
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass
class TensorFile:
    """Tensors by name.

    Attributes:
        shown: The file, for messages.
        stored: What lies there, by name.
        tensor: Gives one of them; bytes are read when touched, and take memory while it lives. It is not to be kept.
    """

    shown: str
    stored: dict[str, Stored]
    tensor: Callable[[str], torch.Tensor]


def _mapped(open_file: Callable[[], Callable[[str], torch.Tensor]]) -> Callable[[str], torch.Tensor]:
    """Read from a file that is mapped: anew after so many bytes, as the pages that were read stay until then."""
    read: Callable[[str], torch.Tensor] | None = None
    touched = 0

    def tensor(name: str) -> torch.Tensor:
        nonlocal read, touched
        if read is None or touched >= RUN_BYTES:
            read = None  # unmaps the file
            read, touched = open_file(), 0
        found = read(name).detach()
        touched += min(found.nbytes, RUN_BYTES)
        return found

    return tensor


def _safetensors_file(path: Path) -> TensorFile:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (no dict)
            held = {name: (tuple(found.get_shape()), found.get_dtype()) for name, found in slices.items()}
    except SafetensorError as error:
        if zipfile.is_zipfile(path):
            raise ValueError(
                f"{caller()}: {path} is no safetensors file, but one of torch.save. Read it by load_torch."
            ) from error
        raise ValueError(
            f"{caller()}: {path} is damaged, or no safetensors file: {error}{_describe_sizes(path)}."
        ) from error
    if lacking := [f"{name}: {code}" for name, (_, code) in held.items() if code not in DTYPES]:
        raise ValueError(f"{caller()}: {path} holds dtypes that torch has no tensors of: {', '.join(lacking)}.")
    stored = {name: Stored(shape, DTYPES[code]) for name, (shape, code) in held.items()}
    return TensorFile(str(path), stored, _mapped(lambda: safe_open(path, framework="pt").get_tensor))


def _describe_sizes(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(8)
    claim = f", and its first eight ask for a header of {int.from_bytes(first, 'little')}" if len(first) == 8 else ""
    return f" (the file has {path.stat().st_size} bytes{claim})"


def _torch_file(path: Path) -> TensorFile:
    """A file of `torch.save`, mapped where its format allows that (since torch 1.6)."""
    held = held_tensors(read_torch(path), str(path))
    if zipfile.is_zipfile(path):
        return TensorFile(held.shown, held.stored, _mapped(lambda: read_torch(path).__getitem__))
    return held


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


def held_tensors(tensors: Any, shown: str = "the mapping") -> TensorFile:
    """A mapping of strided CPU tensors, read like a file; anything else is refused."""
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
    stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return TensorFile(shown, stored, lambda name: tensors[name].detach())


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


def open_safetensors(path: Path) -> TensorFile:
    """The tensors of a file, directory or index of safetensors."""
    return _open(path, _safetensors_file, SAFETENSORS_NAMES, SAFETENSORS)


def open_torch(path: Path) -> TensorFile:
    """Open files of `torch.save`."""
    return _open(path, _torch_file, TORCH_NAMES, TORCH)


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
    missing = [file for file in names_of if not os.path.isfile(path.parent / file)]  # also of a name too long
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
    stored = {name: entry for file in files.values() for name, entry in file.stored.items()}
    return TensorFile(str(path), stored, lambda name: files[first[name]].tensor(name))


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
