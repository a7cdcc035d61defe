"""Batches onto the mesh: checked once for each signature, with an error that names the leaf at fault."""

import dataclasses
import functools
import logging
from dataclasses import replace
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from torch_shard._capture import Spec
from torch_shard._common.caller import caller
from torch_shard._common.dtypes import has_x64
from torch_shard._common.types import LastUsed, PyTree
from torch_shard._common.validate import named
from torch_shard._device import BatchLayout, GatheredLayout, LayoutByPath, LocalLayout
from torch_shard._loss import BatchSignature, Microbatches, array_paths, flatten_batch
from torch_shard._train.same_batches import compare_given

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


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A batch that says for itself whether it has all rows, or those of this process's devices alone."""

    batch: PyTree
    local: bool


@dataclasses.dataclass(frozen=True)
class _BatchPlacement:
    """How batches of one signature come onto the mesh, and the signature that the whole has there."""

    layout: BatchLayout | LayoutByPath | LocalLayout
    signature: BatchSignature


class Placer:
    """Puts the batches of a step onto the mesh."""

    def __init__(self, layout: BatchLayout, microbatches: Microbatches, *, must_divide: bool, local: bool) -> None:
        self._layout, self._microbatches, self._must_divide, self._local = layout, microbatches, must_divide, local
        self._placements = LastUsed[tuple[bool, BatchSignature], _BatchPlacement]()
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
        way = self._placement_of(given, leaves, signature, only_shapes)
        if only_shapes:
            structs: Any = way.layout.structs(leaves)
            return ShardedBatch(structs, way.signature, given.local, tuple(leaves))
        try:
            return ShardedBatch(way.layout.put(leaves), way.signature, given.local, tuple(leaves))
        except (TypeError, OverflowError, NotImplementedError):
            for leaf, path in zip(leaves, array_paths(given.batch), strict=True):
                with named(path):
                    way.layout.put([leaf])
            raise

    def _placement_of(
        self, given: HostBatch, leaves: list[PyTree], signature: BatchSignature, only_shapes: bool
    ) -> _BatchPlacement:
        local = given.local and self._own.rows.num_processes > 1
        key = local, signature
        if local and self._is_compared(key, only_shapes):
            compare_given(self._own.rows, dict(zip(array_paths(given.batch), leaves, strict=True)))
        way = self._placements.use(key)
        if way is None:
            paths = array_paths(given.batch)
            whole = self._whole(signature, paths) if local else signature
            way = _BatchPlacement(self._choose(whole, paths, local), whole)
            self._placements.keep(key, way)
            _say_rounded(paths, signature)
        return way

    def _is_compared(self, key: tuple[bool, BatchSignature], only_shapes: bool) -> bool:
        """Tell whether processes compare this batch: each of a new signature, and of others the 2nd, 4th, 8th, ...

        The time that it takes is then none in the long run.
        """
        if not only_shapes:
            self._num_local += 1
        return key not in self._placements or self._num_local.bit_count() == 1

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

    def _choose(self, whole: BatchSignature, paths: list[str], local: bool) -> BatchLayout | LayoutByPath | LocalLayout:
        """Where the leaves of such a batch go, at these paths in it."""
        specs = list[PyTree](whole.specs)
        if not self._must_divide and self._layout.faults(specs, paths):
            logger.info("%s: a batch that does not divide over the mesh is evaluated whole on each device", caller())
            return GatheredLayout(self._layout) if local else BatchLayout(self._layout.mesh, PartitionSpec())
        try:
            self._layout.check(specs, paths)
            self._microbatches.check(specs, paths)
        except ValueError as error:
            if local:
                error.add_note("Shapes are of the whole batch, of which each process gives the rows of its devices.")
            raise
        if local:
            return self._own
        if self._layout.apart or self._layout.context is not None:
            return LayoutByPath(self._layout.of_leaves([spec.shape for spec in whole.specs], paths))
        return self._layout


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
