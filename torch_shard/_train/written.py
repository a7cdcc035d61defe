"""Whether tensors still have the values that they had, by whatever they were written: torch, `.data` or NumPy.

A state has values of its own, and a program has copies of what the loss closes over. Who writes to the tensors that
these were taken from means to change the run, as it would in torch.
"""

# PyTorch annotates storages in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from typing import Any

import jax
import numpy as np
import torch

from torch_shard._common.convert import to_host

_WORDS = 256
"""Words of 8 bytes that are compared: of a tensor with fewer of them all, of a larger one so many, spread over it."""


class Contents:
    """The values that a tensor has when this is made.

    PyTorch counts what its own operators write, but not what is written through `.data` or by NumPy. So a sample of
    the memory of the tensor is compared as well.
    """

    __slots__ = ("_pointer", "_sample", "_version", "_words", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = _version_of(tensor)
        self._words, self._pointer = _words_of(tensor)
        self._sample = self._words.tobytes()

    def hold(self) -> bool:
        """Tell whether the tensor has them still."""
        if self._version != _version_of(self.tensor):
            return False
        return not self._pointer or (self._pointer == self.tensor.data_ptr() and self._words.tobytes() == self._sample)


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
