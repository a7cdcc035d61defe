"""An optimizer of torch whose `state` is that of the run, as the parameters of a live model are."""

# PyTorch and JAX annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_shard._common.host_memory import to_device
from torch_shard._common.types import PyTree
from torch_shard._device import JaxTensor, Storage
from torch_shard._optim import TorchOptimizer, inner_state
from torch_shard._sharding import Stacks
from torch_shard._state import Entry


class _Shown:
    """What an optimizer shows: its state in the run that has updated by it last, and what was written to that since."""

    def __init__(self) -> None:
        self.state: Any = None
        self.written: dict[tuple[str, str], jax.Array] = {}


_SHOWN = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Shown]()


class LiveOptimizer:
    """Shows the state of a run in an optimizer of torch, and notices what is loaded or written there."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        self._optimizer = optimizer
        self._shown = _SHOWN.setdefault(optimizer.optimizer, _Shown())
        self._names: frozenset[str] = frozenset()
        self._note()

    def follow(self, opt_state: PyTree) -> None:
        """Have the state that a step has made.

        Args:
            opt_state: Of this optimizer alone.
        """
        self._shown.state, self._shown.written = inner_state(opt_state), {}

    def show(self, names: Collection[str]) -> None:
        """Let these parameters have the state of the run in torch, and no others.

        Args:
            names: Those that have been updated, as torch makes a state at the first update.
        """
        self._names = frozenset(names)
        number_of = {name: place for place, name in enumerate(self._optimizer.names)}

        def shown(key: str, name: str, like: torch.Tensor) -> torch.Tensor:
            return JaxTensor(Storage.of(_OptimizerEntry(self._shown, key, name, number_of[name], like)))

        self._optimizer.show(self._names, shown)
        self._note()

    def note_step(self, without_grad: Collection[str]) -> None:
        """Show the state of what the first step has updated."""
        updated = frozenset(self._optimizer.names) - frozenset(without_grad)
        if not updated <= self._names:
            self.show(self._names | updated)

    def _note(self) -> None:
        self._dict, self._tensors = self._optimizer.optimizer.state, self._optimizer.tensors

    def is_changed(self) -> bool:
        """Tell whether the state in torch is another one than what was shown: `load_state_dict`, or a write."""
        if self._shown.written or self._optimizer.optimizer.state is not self._dict:
            return True
        tensors = self._optimizer.tensors
        return len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors))

    def leave_replaced(self) -> None:
        """Let tensors in whose places others are keep their values, for who has them."""
        present = set(map(id, self._optimizer.tensors))
        for tensor in self._tensors:
            if id(tensor) not in present and isinstance(tensor, JaxTensor) and tensor.source is not None:
                tensor._storage.leave()


class _OptimizerEntry(Entry):
    """What an optimizer keeps of a parameter: a moment, or the number of its steps."""

    def __init__(self, shown: _Shown, key: str, name: str, number: int, like: torch.Tensor) -> None:
        super().__init__(f"{key} of {name}", like)
        self._shown, self._key, self._param, self._number = shown, key, name, number

    def _entries(self) -> Any:
        state = self._shown.state
        if self._key in state.slots:
            return state.slots[self._key]
        return state.taken if self._key == "step" else state.kept[self._key]

    def _stored(self) -> jax.Array:
        if (written := self._shown.written.get((self._key, self._param))) is not None:
            return written
        entries = self._entries()
        if isinstance(entries, jax.Array):
            return entries
        if not isinstance(entries, Stacks):
            return entries[self._param]
        return entries.arrays[entries.layout.places[self._param][0]]

    def _value(self) -> jax.Array:
        if (written := self._shown.written.get((self._key, self._param))) is not None:
            return written
        entries = self._entries()
        value = entries[self._number] if isinstance(entries, jax.Array) else entries[self._param]
        return to_device(value).astype(self.dtype)

    def write(self, value: jax.Array) -> None:
        # A copy: the state has it, whose memory a step takes back, and arrays of eager tensors have several owners.
        self._shown.written[self._key, self._param] = jnp.copy(value)
