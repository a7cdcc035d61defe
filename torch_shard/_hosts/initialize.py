"""`ts.initialize()`: one call that starts JAX's processes as one job, whatever has launched them."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import jax

from torch_shard._common.caller import caller, public
from torch_shard._common.validate import check_count, is_integer
from torch_shard._hosts.launchers import (
    HOW,
    Environment,
    Found,
    find,
    of_arguments,
    of_variables,
    read_launchers,
    with_variables,
)

logger = logging.getLogger(__name__)

_launch: Launch | None = None  # what initialize has found, or was told


@dataclasses.dataclass(frozen=True)
class Launch:
    """The start of a job of one or several processes, as `initialize` has found it.

    Attributes:
        launcher: Who has started them, in words; None where nobody says so.
        process_id: Of this process, from 0.
        num_processes: Of the job.
        coordinator: `host:port` where they meet; None for one process, and where JAX has found it by itself.
        local_device_ids: Numbers of the GPUs that are this process's own, among those that it sees; None for all.

    Example:
        >>> print(Launch("SLURM", process_id=1, num_processes=4, coordinator="node001:62464", local_device_ids=(2, 3)))
        process 1 of 4 (SLURM), meeting at node001:62464, with GPUs 2, 3
    """

    launcher: str | None
    process_id: int
    num_processes: int
    coordinator: str | None = None
    local_device_ids: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """One line for a log."""
        by = f" ({self.launcher})" if self.launcher else ""
        if self.num_processes == 1:
            return f"one process{by}"
        parts = [f"process {self.process_id} of {self.num_processes}{by}"]
        parts += [f"meeting at {self.coordinator}"] if self.coordinator else []
        ids = self.local_device_ids
        parts += [f"with GPU{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"] if ids else []
        return ", ".join(parts)


@public
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
) -> Launch:
    """Start JAX's processes as one job, from what the launcher has given them.

    Knows torchrun, SLURM, Open MPI, MPICH and others with PMI, SkyPilot, TPU pods, JobSets of GKE, and the variables
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Nothing is done where JAX's processes are
    started already, as by Ray's JaxTrainer, and where there is one process. Call it first, before JAX is asked for
    devices; it waits until all processes have come. The processes of a host divide its GPUs.

    Args:
        coordinator_address: `host:port` of process 0, where a port is free. By default what the launcher says.
        num_processes: Of the job. 1 makes this process a run of its own, whatever has launched it.
        process_id: Of this process, from 0.
        local_device_ids: Numbers of the GPUs that are this process's own, among those that it sees. By default an equal
            share.
        initialization_timeout: Seconds to wait for the other processes.
        heartbeat_timeout_seconds: After so many seconds without a sign of life JAX takes a process for dead, and ends
            the others.

    Returns:
        What was found, to print; it is logged too, at level INFO.

    Raises:
        TypeError: `local_device_ids` are not integers.
        ValueError: Variables contradict each other or are incomplete, or nothing says where process 0 runs.
        RuntimeError: JAX has started its devices before, or process 0 cannot listen at its address. JAX itself ends a
            process, with status 134 and a stack of C++, if others do not come in time: a warning says before which.

    Example:
        >>> import torch_shard as ts
        >>> print(ts.initialize())
        one process
    """
    global _launch
    check_count("initialization_timeout", initialization_timeout)
    check_count("heartbeat_timeout_seconds", heartbeat_timeout_seconds)
    ids = local_device_ids
    if ids is not None and not (isinstance(ids, Sequence) and all(map(is_integer, ids))):
        raise TypeError(f"{caller()}: local_device_ids must be a sequence of integers, got {ids!r}. As in [0, 1].")
    asked = of_arguments(coordinator_address, num_processes, process_id)
    if jax.distributed.is_initialized():
        _launch = _launch or Launch("jax.distributed.initialize", jax.process_index(), jax.process_count())
        pairs = (num_processes, _launch.num_processes), (process_id, _launch.process_id)
        if any(one not in (None, other) for one, other in pairs):
            raise ValueError(f"{caller()}: JAX's processes are started already, as {_launch}; found {asked.says}.")
        return _launch
    found = find(os.environ, with_variables(asked, os.environ))
    if found is None or found.num_processes == 1:
        _launch = Launch(found and found.launcher, 0, 1)
    else:
        devices = _own_devices(found) if ids is None else tuple(ids)
        _start(found, devices, initialization_timeout, heartbeat_timeout_seconds)
        index, count = found.process_id, found.num_processes
        if index is None or count is None:
            index, count = jax.process_index(), jax.process_count()
        _launch = Launch(found.launcher, index, count, found.coordinator, devices)
    logger.info("%s", _launch)
    return _launch


def _own_devices(found: Found) -> tuple[int, ...] | None:
    """This process's share of the GPUs of the host; None for all, and where JAX uses none or is told which."""
    platforms = (jax.config.values["jax_platforms"] or "gpu").split(",")
    if "JAX_LOCAL_DEVICE_IDS" in os.environ or not {"gpu", "cuda", "rocm"} & set(platforms):
        return None
    return share_devices(os.environ, found.local, len(list(Path("/dev").glob("nvidia[0-9]*"))))


NO_DEVICE = ("", "-1", "NoDevFiles")
"""What stands in CUDA_VISIBLE_DEVICES where there is none; the last is SLURM's word."""


def share_devices(env: Environment, local: tuple[int, int] | None, num_devices: int) -> tuple[int, ...] | None:
    """Divide the GPUs that this process sees among the processes of the host, in order.

    JAX's own detection gives each process one device, the one with its number among the tasks of the node; that wastes
    devices where tasks have several, and names one that is not there where the launcher has bound each task to its own
    (https://github.com/jax-ml/jax/issues/16788).
    """
    index, count = local or (0, 1)
    seen = _count_visible(env, num_devices)
    if count == 1 or seen <= 1 or seen < _count_on_node(env, count, seen):  # the launcher has given it its own
        return None
    if seen % count:
        raise ValueError(
            f"{caller()}: the {count} processes of this host must have equally many of its GPUs, found {seen}. Start "
            "so many processes that they do, choose GPUs by CUDA_VISIBLE_DEVICES, or give local_device_ids=."
        )
    each = seen // count
    return tuple(range(index * each, (index + 1) * each))


def _count_visible(env: Environment, num_devices: int) -> int:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env:
            return sum(device.strip() not in NO_DEVICE for device in env[name].split(","))
    return num_devices


def _count_on_node(env: Environment, count: int, seen: int) -> int:
    """The devices of all processes on the node, as SLURM tells."""
    if env.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(env["SLURM_GPUS_ON_NODE"])
    per_task = env.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # as in a100:2
    return int(per_task) * count if per_task.isdecimal() else seen


_REMEDY = (
    "See that all have started, and that the port is open there and reachable; or give another coordinator_address=."
)


def _start(found: Found, devices: tuple[int, ...] | None, timeout: int, heartbeat: int) -> None:
    if found.launcher == "Kubernetes" and found.by_jax and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"{caller()}: this is an indexed job of Kubernetes ({found.says}), and JAX needs the package kubernetes to "
            "ask how many processes it has. Install it, or set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES in the "
            f"pods, or {HOW}."
        )
    if jax.config.values["jax_cpu_collectives_implementation"] is None:  # CPU devices of others would be out of reach
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    waits = _tell_if_late(found, timeout)
    try:
        jax.distributed.initialize(
            found.coordinator,
            found.num_processes,
            found.process_id,
            devices,
            None if found.by_jax else "deactivate",  # which would give each process one GPU
            timeout,
            heartbeat,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RPC server" in str(error):
            raise RuntimeError(
                f"{caller()}: process 0 is the coordinator, and cannot listen at {found.coordinator}. End what uses "
                f"the port, such as an earlier job, or give all processes another one. JAX says: {error}"
            ) from None
        raise RuntimeError(
            f"{caller()}: all processes must reach the one that has the number 0, found that they did not meet at "
            f"{found.coordinator} within {timeout} s ({found.says}). {_REMEDY} JAX says: {error}"
        ) from error
    except RuntimeError as error:  # the only plain one
        raise RuntimeError(
            f"{caller()}: must be called before JAX starts its devices, found them started already: by jax.devices(), "
            "ts.make_mesh, an array or a tensor on the device jax. Call it first of all."
        ) from error
    finally:
        waits.cancel()


def _tell_if_late(found: Found, timeout: int) -> threading.Timer:
    """Say after a while that others are missing: JAX ends a process for which they never come, without an exception."""
    text = "%s: this process (%s) still waits for the others at %s, and JAX ends it after %d s. %s"
    given = caller(), found.says, found.coordinator or "the place that JAX finds", timeout, _REMEDY
    timer = threading.Timer(min(10.0, timeout / 2), logger.warning, (text, *given))
    timer.start()
    return timer


def coordinator() -> str | None:
    """`host:port` of JAX's coordinator, as far as that is known: JAX tells nobody."""
    return (_launch and _launch.coordinator) or os.environ.get("JAX_COORDINATOR_ADDRESS")


def check_started() -> None:
    """Refuse several processes of a launcher that JAX knows nothing of: each would train by itself."""
    if _launch is not None or jax.process_count() > 1:
        return
    asked = of_variables(os.environ)
    found = read_launchers(os.environ)[0] if asked.num_processes is None else [asked]
    several = next((one for one in found if (one.num_processes or 1) > 1), None)
    if several is not None:
        raise ValueError(
            f"{caller()}: this is one of {several.num_processes} processes ({several.launcher}: {several.says}), but "
            "JAX has one: each would train by itself. Call ts.initialize() first, before JAX is asked for devices. If "
            "each is meant to be a run of its own: ts.initialize(num_processes=1), or JAX_NUM_PROCESSES=1 in the "
            "environment."
        )
