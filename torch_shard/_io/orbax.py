"""Stored arrays to and from orbax: the tensors as one item, which can be read alone, and the rest as another."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from torch_shard._common.types import PyTree
from torch_shard._io.integrity import reading
from torch_shard._io.manifest import TENSORS, SavedArray

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

ITEMS = (TENSORS, "rest")


def _item(stored: SavedArray) -> str:
    return TENSORS if stored.where == TENSORS else "rest"


def make_orbax() -> "ocp.AsyncCheckpointer":
    import orbax.checkpoint as ocp

    # Replicas on the devices of one process cannot share the work: cut into slices, they only take longer to copy.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handlers: Any = {item: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for item in ITEMS}
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))


def _to_restore(structs: dict[str, jax.ShapeDtypeStruct]) -> "ocp.args.PyTreeRestore":
    import orbax.checkpoint as ocp

    restore_args = ocp.checkpoint_utils.construct_restore_args(structs)
    return ocp.args.PyTreeRestore(item=structs, restore_args=restore_args, partial_restore=True)


def to_save(arrays: Mapping[SavedArray, jax.Array]) -> "ocp.args.Composite":
    """Arguments of orbax for a save. Arrays without elements, which orbax refuses, are in the description alone."""
    import orbax.checkpoint as ocp

    return _by_item({stored: array for stored, array in arrays.items() if stored.num_bytes}, ocp.args.PyTreeSave)


def read_arrays(
    orbax: "ocp.AsyncCheckpointer", path: Path, structs: Mapping[SavedArray, jax.ShapeDtypeStruct]
) -> dict[SavedArray, jax.Array]:
    """Arrays of a checkpoint, each onto its shards."""
    given = {stored: struct for stored, struct in structs.items() if stored.num_bytes}
    with reading(str(path)):
        restored = orbax.restore(path, args=_by_item(given, _to_restore))
    return {s: restored[_item(s)][s.label] if s.num_bytes else _empty(struct) for s, struct in structs.items()}


def _empty(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements."""
    whole = np.zeros(struct.shape, struct.dtype)
    return jax.make_array_from_callback(struct.shape, struct.sharding, whole.__getitem__)


def _by_item(
    values: Mapping[SavedArray, PyTree], wrap: "Callable[[dict[str, PyTree]], ocp.args.CheckpointArgs]"
) -> "ocp.args.Composite":
    """For orbax: tensors, which can be read alone, and the rest."""
    import orbax.checkpoint as ocp

    items: dict[str, dict[str, PyTree]] = {}
    for stored, value in values.items():
        items.setdefault(_item(stored), {})[stored.label] = value
    return ocp.args.Composite(**{name: wrap(item) for name, item in items.items()})
