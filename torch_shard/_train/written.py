"""Whether tensors still have the values that they had, by whatever they were written: torch, `.data` or NumPy.

A state has values of its own, and a program has copies of what the loss closes over. Who writes to the tensors that
these were taken from means to change the run, as it would in torch.
"""

# PyTorch annotates storages in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch

from torch_shard._common.convert import to_host
from torch_shard._sharding import Holdings, entry_places

_WORDS = 256
"""Words of 8 bytes that are compared: of a tensor with fewer of them all, of a larger one so many, spread over it."""


class Contents:
    """The values that a tensor has when this is made.

    PyTorch counts what its own operators write, but not what is written through `.data` or by NumPy. So a sample of
    the memory of the tensor is compared as well.
    """

    __slots__ = ("_pointer", "_sample", "_version", "_words")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = _version_of(tensor)
        self._words, self._pointer = _words_of(tensor)
        self._sample = self._words.tobytes()

    def are_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor has them still."""
        if self._version != _version_of(tensor):
            return False
        return not self._pointer or (self._pointer == tensor.data_ptr() and self._words.tobytes() == self._sample)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _words_of(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
    """A view of words of the memory of a tensor, and where that is; of another device there are none."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return np.zeros(0, np.uint8), 0
    start = tensor.storage_offset() * tensor.element_size()
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = (1 + sum(steps)) * tensor.element_size()
    memory = (
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()[start : start + length]
    )
    if length < 8 * _WORDS:
        return memory, tensor.data_ptr()
    words = memory[: length // 8 * 8].view(np.uint64)
    return words[:: words.size // _WORDS], tensor.data_ptr()


def is_in_state(tensor: torch.Tensor, array: jax.Array) -> bool:
    """Tell whether a tensor of the model has the values of a state: they were loaded from what it gave."""
    if not array.is_fully_addressable or tensor.device.type != "cpu" or array.is_deleted():
        return False
    return torch.equal(tensor.detach(), to_host(array).to(tensor.dtype))


class Entries:
    """The parameters and buffers of a model, as they are when this is made."""

    def __init__(self, model: torch.nn.Module, held: Holdings) -> None:
        self._names = {id(tensor): name for name, tensor in held.all.items()}
        places = [place for place in entry_places(model) if place[2] is None or id(place[2]) in self._names]
        self._gets = [(getattr(entries, "get", functools.partial(_get, entries)), key) for entries, key, _ in places]
        self._tensors = [tensor for _, _, tensor in places]
        self._contents: dict[str, tuple[torch.Tensor, Contents]] = {}
        self.note(held.all)

    def note(self, names: Iterable[str]) -> None:
        """Take the values that these have now for what they are to have."""
        tensors = {self._names[id(tensor)]: tensor for tensor in self._tensors if tensor is not None}
        self._contents |= {name: (tensors[name], Contents(tensors[name])) for name in names if name in tensors}

    def replaced(self) -> list[str]:
        """The names under which there are other tensors now, or none, or some where there was none."""
        found = [get(key) for get, key in self._gets]
        if all(map(operator.is_, found, self._tensors)):
            return []
        pairs = zip(self._tensors, found, self._gets, strict=True)
        return [self._names.get(id(tensor), key) for tensor, now, (_, key) in pairs if now is not tensor]

    def written(self) -> list[str]:
        """The names of those with other values now."""
        return [name for name, (tensor, contents) in self._contents.items() if not contents.are_of(tensor)]


def _get(entries: Any, key: str) -> torch.Tensor | None:
    """An entry of a scripted module, whose containers have no `get`."""
    held: dict[str, torch.Tensor] = dict(entries.items())
    return held.get(key)
