"""What a run is, as plain data beside its metrics: mesh, plan, memory by part, loops."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import importlib.metadata
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding

from torch_shard._common.files import replacing
from torch_shard._sharding import describe_spec
from torch_shard._state import KINDS, TrainState
from torch_shard._train import TrainStep

OVERVIEW = "run.json"


MOST_DEVICES, MOST_DRAWN = 64, 4
"""How many devices, and how many entries, are drawn with what lies where."""


def write_overview(directory: Path, step: TrainStep, steps: int) -> None:
    """Write `run.json`, which `torch-shard report` reads.

    Args:
        directory: Of the log.
        step: Of the run.
        steps: Number of batches of the run.
    """
    mesh, state = step.mesh, step.structs
    structs: dict[str, Any] = {name: struct for kind in KINDS for name, struct in getattr(state, kind).items()}
    found = {
        "model": type(step.model).__name__,
        "optimizer": "optax" if isinstance(step.optimizer, tuple) else type(step.optimizer).__name__,
        "steps": steps,
        "mesh": {"axes": {name: int(size) for name, size in mesh.shape.items()}, "num_devices": int(mesh.size)},
        "platform": str(mesh.devices.flat[0].device_kind),
        "entries": [_entry(name, struct) for name, struct in structs.items()],
        "drawn": _drawn(mesh, structs),
        "memory": {name: _per_device(part) for name, part in _parts(state).items()},
        "layers": step.report().splitlines(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "jax", "torchax")},
    }
    with replacing(directory / OVERVIEW) as partial:
        partial.write_text(json.dumps(found), encoding="utf-8")


def _entry(name: str, struct: jax.ShapeDtypeStruct) -> dict[str, Any]:
    sharding: Any = struct.sharding
    size = math.prod(struct.shape) * struct.dtype.itemsize
    head = {"name": name, "shape": list(struct.shape), "dtype": str(struct.dtype)}
    return {**head, "spec": describe_spec(sharding.spec), "bytes": size}


def _drawn(mesh: Mesh, structs: Mapping[str, jax.ShapeDtypeStruct]) -> list[dict[str, Any]]:
    """For each of the first devices what it holds of the largest entry of each sharding."""
    largest: dict[str, str] = {}
    for name, struct in sorted(structs.items(), key=lambda item: -math.prod(item[1].shape)):
        largest.setdefault(describe_spec(cast(NamedSharding, struct.sharding).spec), name)
    devices: list[Any] = list(mesh.devices.flat)[:MOST_DEVICES]
    held: dict[Any, list[str]] = {device: [] for device in devices}
    for name in list(largest.values())[:MOST_DRAWN]:
        shape = structs[name].shape
        indices = cast(NamedSharding, structs[name].sharding).devices_indices_map(shape)
        for device in devices:
            parts = [s.indices(size)[:2] for s, size in zip(indices[device], shape, strict=True)]
            pairs = zip(parts, shape, strict=True)
            shown = (":" if (start, stop) == (0, size) else f"{start}:{stop}" for (start, stop), size in pairs)
            held[device].append(f"{name}[{', '.join(shown)}]")
    return [{"device": int(device.id), "held": texts} for device, texts in held.items()]


def _parts(state: TrainState) -> dict[str, Any]:
    parts = {"parameters": state.params, "frozen": state.frozen, "buffers": state.buffers, "optimizer": state.opt_state}
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def _per_device(part: Any) -> int:
    """Bytes that one device holds."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))


def compilation(step: TrainStep, shapes: list[str], seconds: float) -> dict[str, object]:
    """A record of a program that was compiled.

    Args:
        step: Whose last program it is.
        shapes: Of the leaves of the batch.
        seconds: Until the call that compiled it returned.
    """
    loops = [f"{', '.join(loop.layers)}: {loop.num_iterations}" for loop in step.programs[-1].loops]
    return {"seconds": round(seconds, 3), "batch_shapes": shapes, "loops": loops}
