"""Which GPUs of a host belong to one process, where several processes share the host."""

from collections.abc import Mapping

from torch_shard._common.caller import caller

NO_DEVICE = ("", "-1", "NoDevFiles")
"""What stands in CUDA_VISIBLE_DEVICES where there is none; the last is SLURM's word."""


def share_devices(env: Mapping[str, str], local: tuple[int, int] | None, num_devices: int) -> tuple[int, ...] | None:
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


def _count_visible(env: Mapping[str, str], num_devices: int) -> int:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env:
            return sum(device.strip() not in NO_DEVICE for device in env[name].split(","))
    return num_devices


def _count_on_node(env: Mapping[str, str], count: int, seen: int) -> int:
    """The devices of all processes on the node, as SLURM tells."""
    if env.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(env["SLURM_GPUS_ON_NODE"])
    per_task = env.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # as in a100:2
    return int(per_task) * count if per_task.isdecimal() else seen
