"""Weights from a file onto the mesh: the time, against a plain read of the file and `device_put`; and host memory."""

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import save_file

import torch_shard as ts
from benchmarks.processes import isolated
from benchmarks.rows import Row, timed
from benchmarks.timing import round_robin

SIZES = {"batch": 4, "model": 2}
PLAN = ts.ShardingPlan({"**.weight": P("batch", "model")}, default=P(("batch", "model")))
"""Every tensor is split over all devices, matrices by both of their dims."""


def rows(quick: bool) -> Iterator[Row]:
    """The load of 1 GB of float32, written by the safetensors library."""
    layers, rounds = (2, 3) if quick else (20, 15)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), layers)
        size = path.stat().st_size
        name = f"load {size / 1e9:.2g} GB of safetensors onto (4,2)"
        times = round_robin({"ours": functools.partial(ours, path), "rival": functools.partial(plain, path)}, rounds)
        yield timed(
            f"{name} ÷ read and device_put", times["ours"], times["rival"], 1.3, "the file is in the page cache"
        )
        peaks = [
            isolated("benchmarks.state:peak_bytes", num_devices=8, side=s, path=str(path)) for s in ("ours", "plain")
        ]
        above = [(peak - size) / 1e9 for peak in peaks]
        yield Row(
            f"{name}, peak of resident memory above the size of the file, GB",
            *(f"{found:.3g} GB" for found in above),
            ratio=above[0],
            target=0.25,
            note="VmHWM after it, less VmRSS before it, of a fresh process; the shards lie in the same memory",
        )


def write(folder: Path, layers: int) -> Path:
    """A file of layers as a transformer has them, 52 MB each."""
    torch.manual_seed(0)
    shapes = {"qkv.weight": (3072, 1024), "out.weight": (1024, 1024), "up.weight": (4096, 1024), "norm.bias": (1024,)}
    shapes |= {"down.weight": (1024, 4096), "up.bias": (4096,)}
    tensors = {f"layers.{i}.{name}": torch.randn(shape) for i in range(layers) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def header(path: Path) -> tuple[dict[str, Any], int]:
    """What the file holds, and where its bytes start."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(size))
    return {name: found for name, found in fields.items() if name != "__metadata__"}, 8 + size


def structs(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(found["shape"], np.float32) for name, found in header(path)[0].items()}


def ours(path: Path) -> Any:
    loaded = ts.load_safetensors(path, structs(path), ts.make_mesh(**SIZES), PLAN)
    return jax.block_until_ready([tensor.jax() for tensor in loaded.values()])


def plain(path: Path) -> Any:
    """Read all of the file, then put each tensor onto its shards."""
    shardings = PLAN.resolve(structs(path), ts.make_mesh(**SIZES))
    (fields, start), data = header(path), np.fromfile(path, np.uint8)

    def put(name: str, found: dict[str, Any]) -> jax.Array:
        first, last = found["data_offsets"]
        values = data[start + first : start + last].view(np.float32).reshape(found["shape"])
        return jax.device_put(values, shardings[name])

    return jax.block_until_ready([put(name, found) for name, found in fields.items()])


def peak_bytes(side: str, path: str) -> int:
    """By how much the resident memory of this process grows at most while it loads."""
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))  # JAX has started
    before = _status("VmRSS")
    held = {"ours": ours, "plain": plain}[side](Path(path))
    peak = _status("VmHWM")
    assert held
    return peak - before


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
