"""Values as bytes and back, for what goes from process to process: data alone, so that nothing is executed.

The bytes are msgpack, with an extension for what that lacks.
"""

from typing import Any

import msgpack
import numpy as np
import torch

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
    try:
        # Strict, since a subclass would come out as another type.
        return msgpack.Packer(default=_encode, strict_types=True, unicode_errors="surrogatepass").pack(value)
    except (RecursionError, ValueError) as error:
        raise TypeError(f"a value is too large, or nested too deeply, to be sent to another process: {error}") from None


def unpack(data: bytes) -> Any:
    """Decode what `pack` gives."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")
    except (ArithmeticError, LookupError, RecursionError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"the bytes are not a packed value: {error}") from error


def _encode(value: object) -> msgpack.ExtType:
    return msgpack.ExtType(0, pack(_parts(value)))


def _parts(value: Any) -> list[object]:
    """What makes up a value that msgpack lacks, behind a word for its kind."""
    kind = type(value)
    if kind is tuple:
        return ["tuple", *value]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is int:  # of more than 64 bits
        return ["int", str(value)]
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_plain(value):
        whole = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return ["tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape), data]
    if isinstance(value, np.ndarray | np.generic) and _is_of_bytes(value.dtype):
        return ["array" if isinstance(value, np.ndarray) else "scalar", value.dtype.name, value.shape, value.tobytes()]
    raise TypeError(
        f"{kind.__qualname__} cannot be sent to another process: only None, booleans, numbers, strings, bytes, NumPy "
        "arrays and tensors can, in lists, tuples and dicts"
    )


def _is_of_bytes(dtype: np.dtype[Any]) -> bool:
    """Tell whether the name of a dtype gives it again, and its values are no pointers."""
    try:
        return np.dtype(dtype.name) == dtype and not dtype.hasobject
    except TypeError:
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _decode(code: int, data: bytes) -> Any:
    kind, *parts = unpack(data)
    if kind == "tuple":
        return tuple(parts)
    if kind in ("complex", "int"):
        return complex(*parts) if kind == "complex" else int(*parts)
    name, shape, content = parts
    if kind == "tensor":
        dtype, own = _TORCH_DTYPES[name], bytearray(content)
        return torch.frombuffer(own, dtype=dtype).reshape(shape) if own else torch.empty(shape, dtype=dtype)
    array = np.frombuffer(bytearray(content), np.dtype(name)).reshape(shape)
    return array if kind == "array" else array[()]
