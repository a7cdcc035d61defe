"""Batches that several processes give together: equally many rows each, and the same ones where they share rows."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import torch

from torch_shard._common.caller import caller
from torch_shard._common.convert import struct_of
from torch_shard._common.types import PyTree
from torch_shard._device import HostRows
from torch_shard._hosts import PeerError, exchange
from torch_shard._train.comparison import array_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    shape: tuple[int, ...]
    kind: str
    values: str
    """A scalar's own, a hash of others; empty where there are none."""

    def __str__(self) -> str:
        return f"{self.shape} {self.kind}"


def compare_given(rows: HostRows, leaves: Mapping[str, PyTree]) -> None:
    """Compare what this process gives with what the others give; every process must call this."""
    mine = {path: _describe(leaf) for path, leaf in leaves.items()}
    parts = {path: dataclasses.astuple(leaf) for path, leaf in mine.items()}
    try:
        everything = exchange(lambda: parts, "the rows of a batch, which all compare where its shape is new")
    except PeerError as error:
        listed = ", ".join(f"{path} {leaf}" for path, leaf in mine.items())
        error.add_note(f"Here the batch is {listed}. In each step all processes must give as many rows.")
        raise
    found = [{path: _Leaf(*leaf) for path, leaf in each.items()} for each in everything]
    everyone = range(len(found))
    sharing: dict[tuple[int, ...], list[int]] = {}
    for process in everyone:
        sharing.setdefault(rows.blocks.get(process, ()), []).append(process)
    if faults := _differences(found, everyone, str):
        raise ValueError(
            f"{caller()}: each process gives the rows of its own devices, and must give as many as the others, in the "
            "same leaves.\n\n" + "\n".join(faults) + "\n\nLet all have batches of one size: DataLoader(drop_last="
            "True), a DistributedSampler by data_shard(mesh), rows padded to one length."
        )
    if faults := _differences(found, everyone, lambda leaf: "" if leaf.shape else leaf.values):
        raise ValueError(
            f"{caller()}: a number in a batch is of the whole batch, and so the same in each process.\n\n"
            + "\n".join(faults)
            + "\n\nGive a number for each row: what loss_fn makes of rows (batch['mask'].sum()) is of the whole batch."
        )
    if faults := [fault for group in sharing.values() for fault in _differences(found, group, lambda x: x.values)]:
        raise ValueError(
            f"{caller()}: processes whose devices hold the same rows must give the same ones.\n\n"
            + "\n".join(faults)
            + f"\n\nMesh {rows.where} splits the batch into {len(sharing)} shards for {len(found)} processes: use "
            "DistributedSampler(dataset, num_replicas=count, rank=index) with count, index = data_shard(mesh), and one "
            "seed everywhere."
        )
    has_rows = any(leaf.shape and leaf.values for leaf in found[0].values())
    if len(sharing) > 1 and has_rows and all(each == found[0] for each in found):
        logger.warning(
            "%s: every process gave the same rows, so that the whole batch has them %d times. If each reads all of the "
            "data, split it by data_shard(mesh), or leave local_batches out.",
            caller(),
            len(sharing),
        )


def _describe(leaf: PyTree) -> _Leaf:
    struct = struct_of(leaf)
    return _Leaf(tuple(struct.shape), str(struct.dtype), _values(leaf))


def _values(leaf: PyTree) -> str:
    if isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"):
        return ""
    array: np.ndarray = array_of(leaf)
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest() if array.ndim else str(array)


def _differences(
    found: Sequence[Mapping[str, _Leaf]], processes: Sequence[int], part: Callable[[_Leaf], str]
) -> list[str]:
    """A line for each leaf of which a part is not the same in all of these processes."""
    lines: list[str] = []
    for path in dict.fromkeys(path for process in processes for path in found[process]):
        parts = [part(found[p][path]) if path in found[p] else "nothing" for p in processes]
        other = next((n for n, each in enumerate(parts) if each != parts[0]), None)
        if other is not None:
            shown = [each if len(each) < 32 else "other values" for each in (parts[0], parts[other])]
            lines.append(f"  {path}: {shown[0]} in process {processes[0]}, {shown[1]} in process {processes[other]}.")
    return lines
