"""Batches onto the mesh: checked once for each signature, with an error that names the leaf at fault."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec

from torch_shard._capture import Spec
from torch_shard._common.caller import caller
from torch_shard._common.convert import struct_of
from torch_shard._common.dtypes import has_x64
from torch_shard._common.types import LastUsed, PyTree
from torch_shard._common.validate import named
from torch_shard._device import BatchLayout, GatheredLayout, HostRows, JaxTensor, LocalLayout
from torch_shard._hosts import PeerError, exchange, is_shared
from torch_shard._loss import BatchSignature, Microbatches, array_paths, flatten_batch
from torch_shard._train.comparison import array_of
from torch_shard._train.facts import digest_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ShardedBatch:
    """A batch on the mesh, with what a program depends on in it."""

    arrays: list[jax.Array]
    signature: BatchSignature
    local: bool = False
    """Whether each process gave the rows of its own devices alone."""
    leaves: tuple[PyTree, ...] = ()
    """What the arrays are made of, as it was given."""
    num_rows: int = 1
    """The leading dim of the first leaf that has one, and is not split in a way of its own."""


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A batch that says for itself whether it has all rows, or those of this process's devices alone."""

    batch: PyTree
    local: bool


_Placement = tuple[Sequence[BatchLayout | LocalLayout], BatchSignature, int]
"""How each leaf of batches of one signature comes onto the mesh; of the whole there its signature, and its rows."""


class Placer:
    """Puts the batches of a step onto the mesh."""

    def __init__(self, layout: BatchLayout, microbatches: Microbatches, *, must_divide: bool, local: bool) -> None:
        self._layout, self._microbatches, self._must_divide, self._local = layout, microbatches, must_divide, local
        self._placements = LastUsed[tuple[bool, BatchSignature], _Placement]()
        self._is_shared, self.content = is_shared(layout.mesh), LastUsed[BatchSignature, dict[str, bytes]]()
        """Digests of the first batch of each signature, which all processes must give alike."""
        self._num_local = 0
        if local:
            self._own.rows.shard()

    @functools.cached_property
    def _own(self) -> LocalLayout:
        return LocalLayout(self._layout)

    def put(self, batch: PyTree, *, only_shapes: bool = False) -> ShardedBatch:
        """Put a batch on the mesh; with `only_shapes`, the structs that it would be there."""
        given = batch if isinstance(batch, HostBatch) else HostBatch(batch, self._local)
        leaves, signature = flatten_batch(given.batch)
        if self._must_divide:  # as in training
            _refuse_grad(given.batch, leaves)
        layouts, whole, num_rows = self._placement_of(given, leaves, signature, only_shapes)

        def placed(layout: BatchLayout | LocalLayout, leaf: PyTree) -> Any:
            (found,) = layout.structs([leaf]) if only_shapes else layout.put([leaf])
            return found

        try:
            arrays = list(map(placed, layouts, leaves))
        except (TypeError, OverflowError, NotImplementedError):
            for layout, leaf, path in zip(layouts, leaves, array_paths(given.batch), strict=True):
                with named(path):
                    placed(layout, leaf)
            raise
        if self._is_shared and not (given.local or only_shapes) and self.content.use(whole) is None:
            pairs = zip(whole.paths, leaves, strict=True)
            on_host = [(path, leaf) for path, leaf in pairs if not isinstance(leaf, jax.Array | JaxTensor)]
            self.content.keep(whole, {f"the content of {path}": digest_of(leaf) for path, leaf in on_host})
        return ShardedBatch(arrays, whole, given.local, tuple(leaves), num_rows)

    def _placement_of(
        self, given: HostBatch, leaves: list[PyTree], signature: BatchSignature, only_shapes: bool
    ) -> _Placement:
        local = given.local and self._own.rows.num_processes > 1
        key = local, signature.without_texts
        found = self._placements.use(key)
        self._num_local += local and not only_shapes
        # Processes compare each batch of a new signature, and of others the 2nd, 4th, 8th, ...: that takes no time.
        if local and (found is None or self._num_local.bit_count() == 1):
            compare_given(self._own.rows, dict(zip(array_paths(given.batch), leaves, strict=True)))
        if found is None:
            paths = array_paths(given.batch)
            whole = self._whole(signature, paths) if local else signature
            found = self._choose(whole, paths, local), whole, self._num_rows(whole, paths)
            self._placements.keep(key, found)
            _say_rounded(paths, signature)
        layouts, whole, num_rows = found
        return layouts, whole.with_texts(texts) if (texts := signature.texts) else whole, num_rows

    def _whole(self, own: BatchSignature, paths: list[str]) -> BatchSignature:
        """Signature of the whole of a batch of which this process has a part."""
        shapes = {path: spec.shape for path, spec in zip(paths, own.specs, strict=True) if spec.shape}
        if len({shape[0] for shape in shapes.values()}) > 1 and self._own.rows.num_blocks > 1:
            listed = "\n".join(f"  {path} {shape}: {shape[0]} rows" for path, shape in shapes.items())
            raise ValueError(
                f"{caller()}: several processes give a batch together, each its rows of every leaf but the scalars, "
                f"but the numbers of rows differ:\n\n{listed}\n\nKeep a tensor that is not part of the batch in a "
                "buffer, or let loss_fn close over it; shape several items of a row as (rows, items, ...)."
            )
        whole = (replace(x, shape=self._own.whole(x.shape)) if isinstance(x, Spec) else x for x in own.leaves)
        return replace(own, leaves=tuple(whole))

    def _num_rows(self, whole: BatchSignature, paths: list[str]) -> int:
        with_dims = [pair for pair in zip(whole.specs, self._layout.at(paths), strict=True) if pair[0].shape]
        by_rows = [pair for pair in with_dims if pair[1] is self._layout]
        return next((spec.shape[0] for spec, _ in by_rows or with_dims), 1)

    def _choose(self, whole: BatchSignature, paths: list[str], local: bool) -> Sequence[BatchLayout | LocalLayout]:
        """Where the leaves of such a batch go, at these paths in it."""
        specs = list[PyTree](whole.specs)
        if not self._must_divide and self._layout.faults(specs, paths):
            logger.info("%s: a batch that does not divide over the mesh is evaluated whole on each device", caller())
            everywhere = GatheredLayout(self._layout) if local else BatchLayout(self._layout.mesh, PartitionSpec())
            return [everywhere] * len(paths)
        try:
            self._layout.check(specs, paths)
            self._microbatches.check(specs, paths)
        except ValueError as error:
            if local:
                error.add_note("Shapes are of the whole batch, of which each process gives the rows of its devices.")
            raise
        return [self._own] * len(paths) if local else self._layout.of_leaves([s.shape for s in whole.specs], paths)


def _say_rounded(paths: list[str], signature: BatchSignature) -> None:
    wide = [p for p, s in zip(paths, signature.specs, strict=True) if s.dtype in (torch.float64, torch.complex128)]
    if wide and not has_x64():
        logger.warning(
            "%s: %s: 64-bit floating point, of which JAX keeps 32 bits: values are rounded before loss_fn sees "
            "them. Differences of large numbers (times) lose digits; make them before, or enable jax_enable_x64.",
            caller(),
            ", ".join(wide),
        )


def _refuse_grad(batch: PyTree, leaves: list[PyTree]) -> None:
    """Refuse tensors through which torch's gradient would go on, to what a step does not train."""
    has_history = [isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves]
    if any(has_history):
        names = [path for path, has in zip(array_paths(batch), has_history, strict=True) if has]
        raise ValueError(
            f"{caller()}: {', '.join(names[:8])} was computed from tensors that require grad, and a step gives no "
            "gradient to these. Compute it within the loss, of parameters of the model; or under torch.no_grad() where "
            "they are not to be trained."
        )


# ---- batches that several processes give together ----


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
