"""The tensors of a model that a step was made for, and what tensors that a loss closes over have in them."""

# PyTorch annotates storages in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateUsage=false

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_shard._common.convert import struct_of
from torch_shard._device import JaxTensor, Source
from torch_shard._entries import Holdings, entry_places, holdings

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_SOURCE = operator.attrgetter("_storage.source")

_WORDS = 256
"""Words of 8 bytes that are compared: of a tensor with fewer of them all, of a larger one so many, spread over it."""


class Contents:
    """The values that a tensor has when this is made.

    PyTorch counts what its own operators write, but not what is written through `.data` or by NumPy. So a sample of
    the memory of the tensor is compared as well.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = _version_of(tensor)
        self._content = _content_of(tensor)
        self._words, self._pointer = _words_of(tensor)
        self._sample = self._words.tobytes()

    def hold(self) -> bool:
        """Tell whether the tensor has them still."""
        if self._version != _version_of(self.tensor) or self._content is not _content_of(self.tensor):
            return False
        return not self._pointer or (self._pointer == self.tensor.data_ptr() and self._words.tobytes() == self._sample)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _content_of(tensor: torch.Tensor) -> object:
    """Of a tensor of the device `jax`, what stands for its values: of a live model those of its last state."""
    return tensor.content if isinstance(tensor, JaxTensor) else None


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


class ModelTensors:
    """The parameters and buffers of a model that a step was made for, in their places."""

    def __init__(self, caller: str, model: torch.nn.Module, held: Holdings) -> None:
        self._caller, self._model, self.held = caller, model, held
        self._params = list(held.params.values())
        self._trains = list(map(_REQUIRES_GRAD, self._params))
        names = {id(tensor): name for name, tensor in held.all.items()}
        places = [place for place in entry_places(model) if place[2] is None or id(place[2]) in names]
        self._gets = [(getattr(entries, "get", functools.partial(_get, entries)), key) for entries, key, _ in places]
        self._tensors = [tensor for _, _, tensor in places]
        self._children = [(children, len(children)) for m in model.modules() if (children := m._modules)]
        modules = [(children, key, child) for children, _ in self._children for key, child in children.items()]
        self._gets += [
            (getattr(children, "get", functools.partial(_get, children)), key) for children, key, _ in modules
        ]
        self._placed: list[object] = [*self._tensors, *(child for *_, child in modules)]
        self._sources: list[Source | None] = []

    def present(self) -> Holdings:
        """The tensors that the model has now, which may stand where others of their shapes stood."""
        held = holdings(self._model)
        kinds = [
            [(name, t.shape, struct_of(t).dtype, name in of.trainable) for name, t in of.all.items()]
            for of in (self.held, held)
        ]
        if kinds[0] != kinds[1]:
            apart = sorted({name for name, *_ in set(kinds[0]) ^ set(kinds[1])})
            raise ValueError(
                f"{self._caller}: {_some(apart)} of the model was added, removed, untied or made another shape, dtype "
                "or requires_grad since the step was made, so that its state no longer fits. Make a new step."
            )
        return held

    def check_requires_grad(self) -> None:
        """Refuse parameters that were frozen or unfrozen."""
        with torch._C.DisableTorchFunctionSubclass():  # which costs a call of Python for each attribute
            trains = list(map(_REQUIRES_GRAD, self._params))
        if trains == self._trains:
            return
        changed = [n for n, t in self.held.params.items() if t.requires_grad != (n in self.held.trainable)]
        raise ValueError(
            f"{self._caller}: requires_grad of {', '.join(changed)} has changed since the step was made, so its state "
            "no longer fits the model. Make a new optimizer and a new step, whose init begins from the model's present "
            "values."
        )

    def are_as_noted(self) -> bool:
        """Tell whether all tensors are in their places still, with the values of what `note` has seen them follow."""
        found = [get(key) for get, key in self._gets]
        if not all(map(operator.is_, found, self._placed)) or any(len(own) != num for own, num in self._children):
            return False
        try:
            sources = list(map(_SOURCE, self._tensors))
        except AttributeError:  # some are not on the device `jax`
            sources = self._present_sources()
        return bool(self._sources) and all(map(operator.is_, sources, self._sources))

    def check_places(self) -> None:
        """Refuse parameters in whose places others are.

        An optimizer of torch would go on with the tensors of before, as in torch, and forward with the new ones.
        """
        now = holdings(self._model).params
        names = [name for name, tensor in self.held.params.items() if now.get(name, tensor) is not tensor]
        if names:
            raise ValueError(
                f"{self._caller}: {_some(names)} of the model was replaced since the step was made (by an assignment, "
                "or load_state_dict(assign=True)), and the optimizer has the tensors of before. Write values in place "
                "(load_state_dict, tensor.copy_), or make a new optimizer and a new step."
            )

    def note(self) -> None:
        """Note what the tensors follow now."""
        self._sources = self._present_sources()

    def _present_sources(self) -> list[Source | None]:
        return [tensor.source if isinstance(tensor, JaxTensor) else None for tensor in self._tensors]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _get(entries: Any, key: str) -> torch.Tensor | None:
    """An entry of a scripted module, whose containers have no `get`."""
    held: dict[str, torch.Tensor] = dict(entries.items())
    return held.get(key)
