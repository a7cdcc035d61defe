"""What the host has of a step before it runs, for Python that asks for values: the batch, and buffers of the state."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import torch

from torch_shard._capture import HostInputs
from torch_shard._common.convert import to_host
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._loss.batch import BatchSignature
from torch_shard._sharding import Stacks
from torch_shard._state import TrainState

T = TypeVar("T")
Buffer = Callable[[str], torch.Tensor]
Split = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor]]]


def _whole(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(tensors)]


class HostValues:
    """The batch and the buffers of one call of a step."""

    def __init__(
        self,
        leaves: Sequence[PyTree],
        signature: BatchSignature,
        buffer: Buffer,
        *,
        num: int = 1,
        split: Split = _whole,
        local: bool = False,
    ) -> None:
        self._leaves, self._signature, self._buffer = leaves, signature, buffer
        self.num, self._split = num, split
        self._later = dict[int, Mapping[str, torch.Tensor]]()
        self._missing = _why_missing(leaves, local)

    @functools.cached_property
    def _parts(self) -> list[list[torch.Tensor]]:
        """The leaves of each microbatch."""
        pairs = zip(self._leaves, self._signature.specs, strict=True)
        return self._split([to_cpu(leaf).detach().to(spec.dtype) for leaf, spec in pairs])

    def of(self, number: int = 0) -> HostInputs:
        """What a microbatch has."""
        later = self._later.get(number, {})
        return HostInputs(
            batch=lambda leaf: self._parts[number][leaf],
            buffer=lambda name: later[name] if name in later else self._buffer(name),
            paths=lambda: self._signature.paths,
            missing=self._missing,
            goes_on=self.num > 1,
        )

    def note_later(self, number: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """Note what a microbatch makes of buffers: the next one has these."""
        self._later[number + 1] = {**self._later.get(number, {}), **buffers}


class HostBuffers:
    """Buffers of states on the host, each read once as long as it stays what it is: reading waits for the last step."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        self._own = own
        self._read: dict[str, tuple[jax.Array, torch.Tensor]] = {}

    def value(self, state: TrainState, name: str) -> torch.Tensor:
        """The value of a buffer; that of the model's own where there are no values of a state."""
        own, array = self._own[name], _stored(state, name)
        if not isinstance(array, jax.Array) or array.is_deleted():
            return own
        if (known := self._read.get(name)) is None or known[0] is not array:
            self._read[name] = known = array, to_host(state.buffers[name]).to(own.dtype)
        return known[1]

    def note_kept(self, names: Sequence[str], state: TrainState) -> None:
        """Note the state after a step that has left these buffers as they were."""
        kept = {name: self._read[name][1] for name in names if name in self._read}
        self._read |= {name: (_stored(state, name), value) for name, value in kept.items()}


def _stored(state: TrainState, name: str) -> Any:
    """The stored array in which a buffer is."""
    row = state.buffers.row(name) if isinstance(state.buffers, Stacks) else None
    return state.buffers[name] if row is None else row[0]


def own_copy(leaf: Any) -> Any:
    """A leaf of a batch that nobody else writes to."""
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _why_missing(leaves: Sequence[Any], local: bool) -> str | None:
    if local:
        return (
            "of which each process has the rows of its own devices alone (local_batches=True). Give each process the "
            "whole batch, or compute the value before the step and pass it as data: a number in the batch."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "is_meta", False) for leaf in leaves):
        return "of which only shapes were given. Give a batch with values."
    return None


def capture_with(host: HostInputs, capture: Callable[[], T]) -> T:
    """Capture, and again where that fails and sizes that depend on the batch could have been asked for."""
    try:
        return capture()
    except NotImplementedError:
        if not host.missed:
            raise
    host.sizes = True
    return capture()
