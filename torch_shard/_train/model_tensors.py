"""The tensors of a model that a step was made for: they stay those that its state has the values of.

A state has values of its own, and a program has copies of what the loss closes over. Who writes to the tensors that
these were taken from (by torch, `.data` or NumPy) means to change the run, as it would in torch.
"""

# PyTorch annotates storages in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from torch_shard._common.convert import to_host
from torch_shard._sharding import Holdings, entry_places, holdings
from torch_shard._state import TrainState

logger = logging.getLogger(__name__)

_REQUIRES_GRAD = operator.attrgetter("requires_grad")

_WRITTEN = (
    "Write it within forward or loss_fn, or before step.init; or go on with a new step of step.export(state), changed "
    "as you want it."
)


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
    """Tell whether a tensor of the model has the values of a state, where this process has them."""
    if tensor.device.type != "cpu" or array.is_deleted():
        return False
    own, shards = tensor.detach(), array.addressable_shards
    return all(torch.equal(own[shard.index], to_host(shard.data).to(own.dtype)) for shard in shards)


class ModelTensors:
    """The parameters and buffers of a model, with the values that they have when this is made."""

    def __init__(self, caller: str, model: torch.nn.Module, held: Holdings) -> None:
        self._caller, self._model, self._held = caller, model, held
        self._params = list(held.params.values())
        self._trains = list(map(_REQUIRES_GRAD, self._params))
        names = {id(tensor): name for name, tensor in held.all.items()}
        places = [place for place in entry_places(model) if place[2] is None or id(place[2]) in names]
        self._gets = [(getattr(entries, "get", functools.partial(_get, entries)), key) for entries, key, _ in places]
        self._tensors = [tensor for _, _, tensor in places]
        self._names = [names.get(id(tensor), key) for _, key, tensor in places]
        pairs = zip(self._names, self._tensors, strict=True)
        self._contents = {name: Contents(tensor) for name, tensor in pairs if tensor is not None}

    def present(self) -> Holdings:
        """The tensors that the model has now, which may stand where others of their shapes stood."""
        held = holdings(self._model)
        kinds = [
            [(name, t.shape, t.dtype, name in of.trainable) for name, t in of.all.items()] for of in (self._held, held)
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
        if list(map(_REQUIRES_GRAD, self._params)) == self._trains:
            return
        changed = [n for n, t in self._held.params.items() if t.requires_grad != (n in self._held.trainable)]
        raise ValueError(
            f"{self._caller}: requires_grad of {', '.join(changed)} has changed since the step was made, so its state "
            "no longer fits the model. Make a new step, and carry the values over with step.export(state)."
        )

    def check_values(self, state: TrainState, *, train: bool) -> None:
        """Refuse what was done to the model since the state was taken from it, and is not in the state.

        An evaluation is of the parameters that it is given, and only warns of others in the model.
        """
        found = [get(key) for get, key in self._gets]
        if not all(map(operator.is_, found, self._tensors)):
            places = zip(self._names, self._tensors, found, strict=True)
            names = [name for name, tensor, now in places if now is not tensor]
            raise ValueError(
                f"{self._caller}: {_some(names)} of the model was replaced since the step took its values (by an "
                "assignment, or load_state_dict(assign=True)), and the state has those of before. Take a new state "
                "(step.init), or make a new step with a new optimizer."
            )
        written = {name: contents.tensor for name, contents in self._contents.items() if not contents.hold()}
        if not written:
            return
        apart = [n for n, t in written.items() if not is_in_state(t, state.tensors[n])]
        if refused := [name for name in apart if train or name in self._held.buffers]:
            raise ValueError(
                f"{self._caller}: {_some(refused)} of the model was written since the step took its values, which the "
                f"state does not see: it has its own. {_WRITTEN}"
            )
        if apart:
            logger.warning(
                "%s: %s of the model was written since the step took its values. The state has its own, which stay as "
                "they are. %s",
                self._caller,
                _some(apart),
                _WRITTEN,
            )
        self._contents |= {name: Contents(tensor) for name, tensor in written.items()}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _get(entries: Any, key: str) -> torch.Tensor | None:
    """An entry of a scripted module, whose containers have no `get`."""
    held: dict[str, torch.Tensor] = dict(entries.items())
    return held.get(key)
