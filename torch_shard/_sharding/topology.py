"""Devices that only compile: those of a TPU pod, or GPUs, that this machine does not have.

XLA's compiler for TPUs comes with libtpu and the one for GPUs with the CUDA wheels of JAX; neither needs a device. The
GPUs are described by what XLA's own `xla/backends/gpu/target_config/specs` says of them.
"""

# JAX has no stubs for its ahead-of-time topologies.
# pyright: reportUnknownMemberType=false

import dataclasses
import importlib.util
import math
import os
from typing import Any

import jax
from jax.experimental import topologies

from torch_shard._common.caller import caller
from torch_shard._common.types import Device


@dataclasses.dataclass(frozen=True)
class TpuChip:
    """One kind of TPU.

    Attributes:
        title: Its kind, as JAX has it.
        memory: Bytes that a program of one device may have, by the compiler.
        shapes: Some of its topologies.
        options: What JAX is to be told, so that its devices are those that users have.
    """

    title: str
    memory: int
    shapes: tuple[str, ...]
    options: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


@dataclasses.dataclass(frozen=True)
class GpuChip:
    """One kind of GPU; see XLA's `GpuDeviceInfoProto`.

    Attributes:
        memory: Of the device, bytes.
        bandwidth: Of its memory, bytes per second.
        capability: CUDA's compute capability.
        cores: Number of streaming multiprocessors.
        units: Of float32 arithmetic in each.
        shared: Memory of each, bytes.
        cache: Second level, bytes.
        clock: GHz.
        title: Its full name.
    """

    memory: int
    bandwidth: int
    capability: tuple[int, int]
    cores: int
    units: int
    shared: int
    cache: int
    clock: float
    title: str

    @property
    def description(self) -> str:
        """XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              shared_memory_per_block: 49152  shared_memory_per_block_optin: {self.shared - 1024}
              shared_memory_per_core: {self.shared}
              core_count: {self.cores}  fpus_per_core: {self.units}  clock_rate_ghz: {self.clock}
              memory_bandwidth: {self.bandwidth}  l2_cache_size: {self.cache}  device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major}  minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9  minor: 8 }}
            runtime_version {{ major: 12  minor: 9 }}
            device_description_str: "{self.title}"
        """


_GIB = 2**30

TPUS = {
    "v4": TpuChip("TPU v4", int(30.75 * _GIB), ("2x2x1", "4x4x4"), {"chip_config_name": "megacore"}),
    "v5e": TpuChip("TPU v5 lite", int(15.75 * _GIB), ("2x2", "2x4", "4x4", "8x8", "16x16")),
    "v5p": TpuChip("TPU v5", int(95.74 * _GIB), ("2x2x1", "8x8x8", "4x8x16")),
    "v6e": TpuChip("TPU v6 lite", int(31.25 * _GIB), ("2x2", "4x4", "16x16", "16x32")),
    "tpu7x": TpuChip("TPU7x", int(94.75 * _GIB), ("2x2x1", "8x8x8")),
}
"""What libtpu 0.0.42 says when a program is too large."""

GPUS = {
    "a100": GpuChip(85100068864, 2039040000000, (8, 0), 108, 64, 167936, 41943040, 1.41, "NVIDIA A100-SXM4-80GB"),
    "h100": GpuChip(84978434048, 3352320000000, (9, 0), 132, 128, 233472, 52428800, 1.98, "NVIDIA H100 80GB HBM3"),
    "h200": GpuChip(151397597184, 4800000000000, (9, 0), 132, 128, 233472, 52428800, 1.98, "NVIDIA H200 141GB HBM3e"),
    "b200": GpuChip(191514411008, 7672320000000, (10, 0), 148, 128, 233472, 132644864, 1.965, "NVIDIA B200"),
}

# While libtpu is loaded. Else it asks a server of Google's cloud where it is, and wants to be alone on the machine.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


def topology_devices(topology: object, num_slices: int | None = None) -> list[Device]:
    """The devices of a topology that this machine need not have.

    Args:
        topology: Such as `"v5e:16x16"` or `"h100:8"`.
        num_slices: How many such TPU slices.
    """
    chip, _, shape = topology.partition(":") if isinstance(topology, str) else ("", "", "")
    if chip in GPUS and shape.isdecimal() and int(shape):
        if num_slices is not None:
            raise ValueError(f"{caller()}: num_slices= is for TPUs, whose slices a slow network joins.")
        _require("jax_cuda12_plugin", "cuda", f"{chip}:{shape}")
        gpus: Any = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=GPUS[chip].description, topology=f"1x1x{int(shape)}"
        )
        return list(gpus.devices)
    if chip in TPUS and shape and all(size.isdecimal() and int(size) for size in shape.split("x")):
        return _tpus(chip, shape, num_slices)
    raise _unknown(topology)


def is_compile_only(device: object) -> bool:
    """Tell whether nothing can be put on a device, as it is one of a topology."""
    client: Any = getattr(device, "client", None)
    return getattr(client, "runtime_type", None) == "compile_only_runtime"


def memory_of(device: object) -> int | None:
    """Bytes that a program of one device may have; None if that is not known."""
    kind = str(getattr(device, "device_kind", ""))
    for chip in (*TPUS.values(), *GPUS.values()):
        if chip.title == kind:
            return chip.memory
    return None


def _unknown(topology: object, why: str = "") -> ValueError:
    known = [f"{chip}:{shape}" for chip, tpu in TPUS.items() for shape in tpu.shapes]
    return ValueError(
        f"{caller()}: there is no topology {topology!r}{why}. TPUs are named by chip and shape: "
        f"{', '.join(known)}, and others of these chips; GPUs by kind and number, as in h100:8: {', '.join(GPUS)}."
    )


def _require(module: str, extra: str, topology: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"{caller()}: topology={topology!r} needs {module}, which compiles for it and needs no device: "
            f"pip install 'torch_shard[{extra}]'."
        )


def _tpus(chip: str, shape: str, num_slices: int | None) -> list[Device]:
    name = f"{chip}:{shape}"
    options: dict[str, Any] = dict(TPUS[chip].options)
    if num_slices is not None:
        options["num_slices"] = num_slices
    sizes = [int(size) for size in shape.split("x")]
    if math.prod(sizes) == 1:
        # A topology of a single chip is none of those that a host has by default.
        options["chips_per_host_bounds"] = tuple(sizes)

    # On a TPU, libtpu is loaded already and knows where it is.
    added: dict[str, str] = {}
    if jax.default_backend() != "tpu":
        _require("libtpu", "tpu", name)
        added = {key: value for key, value in _LIBTPU.items() if key not in os.environ}

    os.environ.update(added)
    try:
        description: Any = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except RuntimeError as error:
        raise _unknown(name, f" ({error})") from error
    finally:
        for key in added:
            os.environ.pop(key, None)
    return list(description.devices)
