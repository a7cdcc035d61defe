"""The tensors of a checkpoint as those of any file of weights, and the other way round, without a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._checkpoint import Checkpointer
from torch_shard._common.convert import host_array, to_host
from torch_shard._common.dtypes import torch_dtype
from torch_shard._head import read_head
from torch_shard._integrity import find_damage
from torch_shard._inventory import find_checkpoint
from torch_shard._orbax import make_orbax, read_arrays
from torch_shard._saved import TENSORS, SavedArray
from torch_shard._tensor_files import Stored
from torch_shard._train.state import TrainState


class CheckpointTensors:
    """Parameters and buffers of a checkpoint, those that a `state_dict` has, by name; a tie under one name.

    Args:
        path: A checkpoint, or a directory of them, of which the newest is taken.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = find_checkpoint(path).absolute()  # as orbax asks
        self.shown = str(self._path)
        if damage := find_damage(self._path):
            raise ValueError(f"{self._path} is damaged: {'; '.join(damage)}.")
        head = read_head(self._path)
        self._orbax = make_orbax()
        self._read: tuple[SavedArray | None, Any] = (None, None)
        self._homes = {
            name: stored
            for stored in head.stored
            for name in stored.names
            if stored.where == TENSORS and name not in head.unsaved
        }
        self._wide = head.wide
        self.stored = {name: Stored(*self._torch_type(name)) for name in self._homes}

    def tensor(self, name: str) -> torch.Tensor:
        """One of them; the stack of which it is a row is kept for the next."""
        stored = self._homes[name]
        if self._read[0] != stored:
            device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
            struct = jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=device)
            self._read = stored, read_arrays(self._orbax, self._path, {stored: struct})[stored]
        array = self._read[1]
        row = to_host(array if len(stored.names) == 1 else array[stored.names.index(name)])
        return row.to(self.stored[name].dtype)

    def _torch_type(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        shape, dtype = self._homes[name].entry_type
        return shape, torch.int64 if name in self._wide else torch_dtype(np.dtype(dtype))


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write tensors as the checkpoint of a run at its beginning, from which `restore(params_only=True)` takes them.

    Raises:
        FileExistsError: The directory holds checkpoints.
        TypeError: A tensor needs 64 bits, which JAX has switched off.
    """
    with Checkpointer(directory, asynchronous=False) as checkpointer:
        if checkpointer.steps():
            raise FileExistsError(f"{directory} holds checkpoints of steps {checkpointer.steps()}. Name another one.")
        zero = jnp.zeros((), jnp.int32)
        params = {name: jnp.asarray(host_array(tensor)) for name, tensor in tensors.items()}
        wide = tuple(name for name, tensor in tensors.items() if tensor.dtype is torch.int64)
        state = TrainState(zero, params, {}, {}, (), jax.random.key(0), zero, wide=wide)
        checkpointer.save(state)
        return checkpointer.path(0)
