"""Batches onto the mesh: checked once for each signature, with an error that names the leaf at fault."""

import dataclasses
import logging
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from torch_shard._common.caller import caller
from torch_shard._common.dtypes import has_x64
from torch_shard._common.types import PyTree
from torch_shard._common.validate import named
from torch_shard._device import BatchLayout
from torch_shard._train.batch import BatchSignature, array_paths, flatten_batch
from torch_shard._train.microbatches import Microbatches

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A batch on the mesh, with what a program depends on in it."""

    arrays: list[jax.Array]
    signature: BatchSignature


class Placer:
    """Puts the batches of a step onto the mesh.

    Args:
        layout: How they lie there.
        microbatches: Into which they are split.
        must_divide: Refuse what does not divide over the mesh; else it goes whole to each device.
    """

    def __init__(self, layout: BatchLayout, microbatches: Microbatches, *, must_divide: bool) -> None:
        self._layout, self._microbatches, self._must_divide = layout, microbatches, must_divide
        self._layouts: dict[BatchSignature, BatchLayout] = {}

    def put(self, batch: PyTree, *, only_shapes: bool = False) -> Placed:
        """Put a batch on the mesh; with `only_shapes`, the structs that it would be there.

        Raises:
            ValueError: It does not divide over the mesh.
        """
        leaves, signature = flatten_batch(batch)
        layout = self._layout_of(batch, leaves, signature)
        if only_shapes:
            structs: Any = layout.structs(leaves)
            return Placed(structs, signature)
        try:
            return Placed(layout.put(leaves), signature)
        except (TypeError, OverflowError, NotImplementedError):
            for leaf, path in zip(leaves, array_paths(batch), strict=True):
                with named(path):
                    layout.put([leaf])
            raise

    def _layout_of(self, batch: PyTree, leaves: list[PyTree], signature: BatchSignature) -> BatchLayout:
        if signature not in self._layouts:
            paths = array_paths(batch)
            self._layouts[signature] = self._choose(leaves, paths)
            _say_rounded(paths, signature)
        return self._layouts[signature]

    def _choose(self, leaves: list[PyTree], paths: list[str]) -> BatchLayout:
        """Where the leaves of such a batch go, at these paths in it."""
        if not self._must_divide and self._layout.faults(leaves, paths):
            logger.info("%s: a batch that does not divide over the mesh is evaluated whole on each device", caller())
            return BatchLayout(self._layout.mesh, PartitionSpec())
        self._layout.check(leaves, paths)
        self._microbatches.check(leaves, paths)
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
