"""Values as bytes and back, for what goes from process to process: data alone, so that nothing is executed.

The bytes are JSON, with a tag for what JSON lacks, and behind it the contents of arrays, tensors and byte strings in
the order in which JSON names them.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TORCH_DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}


def pack(value: object) -> bytes:
    """Encode a value.

    Args:
        value: None, booleans, numbers, strings, bytes, NumPy arrays and tensors on the CPU, in lists, tuples and dicts.

    Raises:
        TypeError: Something else is in it.
    """
    blobs: list[Any] = []
    try:
        header = json.dumps(_encode(value, blobs)).encode()
    except RecursionError:
        raise TypeError("lists in lists are nested too deeply to be sent to another process") from None
    return b"".join([len(header).to_bytes(4, "big"), header, *blobs])


def unpack(data: bytes) -> Any:
    """Decode what `pack` gives."""
    try:
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            raise ValueError("they end too early")
        reader = _Reader(memoryview(data)[4 + size :])
        value = reader.decode(json.loads(data[4 : 4 + size]))
        if reader.rest:
            raise ValueError("there are bytes left over")
        return value
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the bytes are not a packed value: {error}") from error


def _encode(value: Any, blobs: list[Any]) -> object:
    """Give what JSON has for a value; `type() in`, since a subclass would come out as another type."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(each, blobs) for each in value]
    if kind is tuple:
        return {"tuple": [_encode(each, blobs) for each in value]}
    if kind is dict:
        return {"dict": [[_encode(name, blobs), _encode(each, blobs)] for name, each in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray | np.generic) and _dtype(value.dtype.name) == value.dtype:
        blobs.append(np.ascontiguousarray(value).tobytes())
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return {tag: [value.dtype.name, list(value.shape)]}
    if isinstance(value, torch.Tensor) and kind in _TENSORS and _is_plain(value):
        whole = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        blobs.append(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    raise TypeError(
        f"{kind.__qualname__} cannot be sent to another process: only None, booleans, numbers, strings, bytes, NumPy "
        "arrays and tensors can, in lists, tuples and dicts"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _dtype(name: str) -> np.dtype[Any] | None:
    """The NumPy dtype of this name if its values are bytes; those of objects are pointers."""
    try:
        found = np.dtype(name)
    except TypeError:
        return None
    return None if found.hasobject else found


class _Reader:
    """Takes contents from the bytes behind the JSON, one after the other."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def decode(self, found: Any) -> Any:
        if isinstance(found, list):
            return [self.decode(each) for each in found]
        if not isinstance(found, dict):
            return found
        ((tag, content),) = found.items()
        if tag == "tuple":
            return tuple(self.decode(each) for each in content)
        if tag == "dict":
            return dict(self._pairs(content))
        if tag == "complex":
            return complex(*content)
        if tag == "bytes":
            return bytes(self._take(content))
        if tag == "tensor":
            return self._tensor(*content)
        if tag in ("array", "scalar"):
            array = self._array(*content)
            return array if tag == "array" else array[()]
        raise ValueError(f"{tag!r} is not a tag")

    def _pairs(self, content: list[Any]) -> Iterator[tuple[Any, Any]]:
        for name, value in content:
            yield self.decode(name), self.decode(value)

    def _array(self, name: str, shape: list[int]) -> np.ndarray:
        dtype = _dtype(name)
        if dtype is None:
            raise ValueError(f"{name!r} is not a dtype of data")
        return np.frombuffer(bytearray(self._take(math.prod(shape) * dtype.itemsize)), dtype).reshape(shape)

    def _tensor(self, name: str, shape: list[int]) -> torch.Tensor:
        dtype = _TORCH_DTYPES[name]
        content = bytearray(self._take(math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.rest):
            raise ValueError(f"{size} bytes are announced, and {len(self.rest)} are there")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken
