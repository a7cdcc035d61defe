"""Rows of a batch that several processes give together, each those of its own devices."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_shard._common.caller import caller, public
from torch_shard._common.convert import host_array, struct_of
from torch_shard._common.specs import describe_mesh
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._device.placement import BatchLayout
from torch_shard._device.tensor import JaxTensor
from torch_shard._sharding import refuse_compile_only


@public
def data_shard(mesh: Mesh, batch_spec: PartitionSpec | None = None) -> tuple[int, int]:
    """Say which of how many shards of the data this process reads: `num_replicas` and `rank` of a `DistributedSampler`.

    These are shards of the batch, not processes: with `model` across hosts, two hosts read the same rows, and so have
    the same index.

    Args:
        mesh: Of the step.
        batch_spec: Of the step. By default the leading dim of a batch is split over the mesh axis `batch`.

    Returns:
        `(count, index)`: `(1, 0)` in one process. Shards are numbered by their first row in a batch.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The mesh lacks an axis, has no device of this process, or gives two processes some of their rows in
            common and not all.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> count, index = ts.data_shard(ts.make_mesh(batch=4, model=2))
        >>> count, index  # in one process
        (1, 0)
        >>> dataset = torch.randn(64, 4)
        >>> sampler = DistributedSampler(dataset, num_replicas=count, rank=index)
        >>> loader = DataLoader(dataset, batch_size=8 // count, sampler=sampler)
    """
    check_kind("batch_spec", batch_spec, PartitionSpec | None)
    return HostRows.of(BatchLayout(mesh, batch_spec)).shard()


@dataclasses.dataclass(frozen=True)
class HostRows:
    """Which rows of a batch lie on the devices of which process.

    Attributes:
        num_blocks: Of so many blocks of equally many rows, one for each shard of the leading dim.
        blocks: Those of each process, in order.
        process: This one.
        where: The mesh, for messages.
    """

    num_blocks: int
    blocks: Mapping[int, tuple[int, ...]]
    process: int
    where: str

    @classmethod
    def of(cls, layout: BatchLayout) -> HostRows:
        """For batches of this layout."""
        mesh, found = layout.mesh, collections.defaultdict[int, set[int]](set)
        placed = layout.sharding(1).devices_indices_map((mesh.size,))
        for device, (rows,) in placed.items():
            found[device.process_index].add(rows.start or 0)
        starts = sorted(set().union(*found.values()))
        blocks = {process: tuple(map(starts.index, sorted(own))) for process, own in sorted(found.items())}
        if (process := jax.process_index()) not in blocks:
            raise ValueError(
                f"{caller()}: mesh {describe_mesh(mesh)} has no device of process {process}, so there are no rows for "
                "it. Make the mesh of devices of all processes."
            )
        return cls(len(starts), blocks, process, describe_mesh(mesh))

    @property
    def num_processes(self) -> int:
        """Number of processes whose devices are in the mesh."""
        return len(self.blocks)

    @property
    def own(self) -> tuple[int, ...]:
        """The blocks of this process."""
        return self.blocks[self.process]

    def shard(self) -> tuple[int, int]:
        """Number of processes that have rows of their own, and the place of this one among them."""
        distinct = sorted(set(self.blocks.values()))
        if sum(map(len, distinct)) > self.num_blocks or len(set(map(len, distinct))) > 1:
            listed = (f"  process {p}: {', '.join(map(str, own))}" for p, own in self.blocks.items())
            raise ValueError(
                f"{caller()}: two processes must have the same rows of a batch or none in common, and each as many as "
                f"the others. Mesh {self.where} splits a batch into {self.num_blocks} blocks of rows, of which they "
                "have\n\n"
                + "\n".join(listed)
                + "\n\nChoose sizes of axes so that each process holds whole blocks of its "
                "own, or let each give the whole batch (without local_batches, by a DataLoader of all rows)."
            )
        return len(distinct), distinct.index(self.own)

    def num_whole(self, num_rows: int) -> int:
        """Rows of the whole batch, of which this process has so many."""
        return num_rows * self.num_blocks // len(self.own)

    def of_whole(self, num_rows: int) -> list[range]:
        """Rows of a whole batch that this process has, a range for each block."""
        size = num_rows // self.num_blocks
        return [range(block * size, (block + 1) * size) for block in self.own]


class LocalLayout:
    """Placement of batches of which each process has the rows of its own devices, in order."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout, self.rows = layout, HostRows.of(layout)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole of a leaf, of which this process has a part of this shape."""
        return (self.rows.num_whole(shape[0]), *shape[1:]) if shape else shape

    def put(self, leaves: list[PyTree]) -> list[jax.Array]:
        """Leaves onto the mesh."""
        refuse_compile_only(self._layout.mesh)
        return [self._put(_on_host(leaf)) for leaf in leaves]

    def structs(self, leaves: list[PyTree]) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding that leaves have on the mesh; of leaves with shapes alone, too."""
        found = [struct_of(leaf) for leaf in leaves]
        return [s.update(shape=self.whole(s.shape), sharding=self._layout.sharding(len(s.shape))) for s in found]

    def _put(self, host: np.ndarray) -> jax.Array:
        shape, sharding = self.whole(host.shape), self._layout.sharding(host.ndim)
        if not shape:
            return jax.make_array_from_callback(shape, sharding, host.__getitem__)
        size = shape[0] // self.rows.num_blocks

        def read(index: Any) -> np.ndarray:
            first = self.rows.own.index((index[0].start or 0) // size) * size if size else 0
            return host[(slice(first, first + size), *index[1:])]

        return jax.make_array_from_callback(shape, sharding, read)


class GatheredLayout(LocalLayout):
    """Placement of such batches whole on each device, where they do not divide over the mesh."""

    def put(self, leaves: list[PyTree]) -> list[jax.Array]:
        """Leaves onto the mesh, where each device gets the rows of all processes."""
        refuse_compile_only(self._layout.mesh)
        return [self._gather(_on_host(leaf)) for leaf in leaves]

    def structs(self, leaves: list[PyTree]) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding that leaves have on the mesh."""
        return [struct.update(sharding=self._everywhere) for struct in super().structs(leaves)]

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self._layout.mesh, PartitionSpec())

    def _gather(self, host: np.ndarray) -> jax.Array:
        if not host.ndim:
            return jax.make_array_from_callback((), self._everywhere, host.__getitem__)
        blocks = (self.rows.num_blocks, *host.shape)
        spread = jax.make_array_from_callback(blocks, self._layout.sharding(1), lambda _: host[None])
        firsts = tuple(own[0] for own in sorted(set(self.rows.blocks.values())))
        return _join(spread, firsts, self._everywhere)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(spread: jax.Array, firsts: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The rows at these blocks, one after the other."""
    joined = spread[np.array(firsts)].reshape(-1, *spread.shape[2:])
    return jax.lax.with_sharding_constraint(joined, sharding)


def _on_host(leaf: PyTree) -> np.ndarray:
    """A copy of a leaf, as the caller may write to its batch while the step still runs."""
    array = leaf.jax() if isinstance(leaf, JaxTensor) else leaf
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise TypeError(
            f"it lies on devices of several processes, so it is a whole leaf ({array.shape}), where each process is to "
            "give its own rows. Give CPU tensors or numpy arrays."
        )
    return np.array(host_array(array, rounds=True), order="C")
