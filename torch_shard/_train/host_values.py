"""What the host has of a step before it runs, for Python that asks for values: the batch, and buffers of the state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import torch

from torch_shard._capture import HostInputs, Mismatch
from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._train.batch import BatchSignature

T = TypeVar("T")
Buffer = Callable[[str], torch.Tensor]
Split = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor]]]


def _whole(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(tensors)]


class HostValues:
    """The batch and the buffers of one call of a step.

    Args:
        leaves: Array leaves of the batch, as the user gave them, or shapes of them.
        signature: Of the batch.
        buffer: Gives a buffer by name.
        num: Number of microbatches.
        split: Gives the leaves of each.
        local: The leaves have the rows of this process's devices alone.
    """

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
        self._missing = _why_missing(leaves, local)

    @functools.cached_property
    def _parts(self) -> list[list[torch.Tensor]]:
        """The leaves of each microbatch."""
        pairs = zip(self._leaves, self._signature.specs, strict=True)
        return self._split([_on_host(leaf).to(spec.dtype) for leaf, spec in pairs])

    def of(self, number: int = 0) -> HostInputs:
        """What a microbatch has."""
        return HostInputs(
            batch=lambda leaf: self._parts[number][leaf],
            buffer=self._buffer,
            paths=lambda: self._signature.paths,
            missing=self._missing,
        )


def own_copy(leaf: PyTree) -> PyTree:
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


def _on_host(leaf: Any) -> torch.Tensor:
    tensor = to_cpu(leaf)
    return tensor.detach() if isinstance(leaf, torch.Tensor) else tensor


def refuse_microbatches(found: Mismatch, number: int) -> NotImplementedError:
    """The error of microbatches that need different programs."""
    return NotImplementedError(
        f"{caller()}: {found} in microbatch {number} of the same batch, and one program runs all of them. Use "
        "accumulate_steps=1, pad to one size, or pass the value as data."
    )


def capture_with(host: HostInputs, capture: Callable[[], T]) -> T:
    """Capture, and again where that fails and sizes that depend on the batch could have been asked for."""
    try:
        return capture()
    except NotImplementedError:
        if not host.missed:
            raise
    host.sizes = True
    return capture()
