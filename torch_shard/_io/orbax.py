"""Stored arrays to and from orbax, which writes them all, and reads those that are asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from torch_shard._io.integrity import reading
from torch_shard._io.manifest import SavedArray

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def make_orbax() -> "ocp.AsyncCheckpointer":
    import orbax.checkpoint as ocp

    # Replicas on the devices of one process cannot share the work: cut into slices, they only take longer to copy.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))


def to_save(arrays: Mapping[SavedArray, jax.Array]) -> "ocp.args.PyTreeSave":
    """Arguments of orbax for a save. Arrays without elements, which orbax refuses, are in the description alone."""
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave({stored.label: array for stored, array in arrays.items() if stored.num_bytes})


def read_arrays(
    orbax: "ocp.AsyncCheckpointer", path: Path, structs: Mapping[SavedArray, jax.ShapeDtypeStruct]
) -> dict[SavedArray, jax.Array]:
    """Arrays of a checkpoint, each onto its shards."""
    import orbax.checkpoint as ocp

    given = {stored.label: struct for stored, struct in structs.items() if stored.num_bytes}
    restore_args = ocp.checkpoint_utils.construct_restore_args(given)
    with reading(str(path)):
        found = orbax.restore(
            path, args=ocp.args.PyTreeRestore(item=given, restore_args=restore_args, partial_restore=True)
        )
    return {s: found[s.label] if s.num_bytes else _empty(struct) for s, struct in structs.items()}


def _empty(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements."""
    whole = np.zeros(struct.shape, struct.dtype)
    return jax.make_array_from_callback(struct.shape, struct.sharding, whole.__getitem__)
