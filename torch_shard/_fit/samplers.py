"""Samplers that give a process a shard of the data: the one that its devices hold, or none."""

from typing import Any

from torch_shard._common.caller import caller
from torch_shard._common.validate import is_integer
from torch_shard._device import HostRows
from torch_shard._fit.data import parts_of
from torch_shard._train import Step

_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""Of a `DistributedSampler` and all that copy it; of accelerate's `BatchSamplerShard`."""


def check_samplers(argument: str, loader: Any, step: Step) -> None:
    """Refuse a loader with a sampler that takes another shard of the data than the step does.

    Args:
        argument: The name of the loader.
        loader: A `DataLoader`, or anything else.
        step: Which takes its batches.

    Raises:
        ValueError: A sampler takes a shard where whole batches are to come, or another shard than `data_shard` says.
    """
    for part in parts_of(loader):
        for names in _NAMES:
            found = tuple(getattr(part, name, None) for name in names)
            if all(map(is_integer, found)):
                _check(argument, type(part).__name__, dict(zip(names, found, strict=True)), step)


def _check(argument: str, kind: str, found: dict[str, Any], step: Step) -> None:
    said = f"the {kind} of {argument} has {', '.join(f'{name}={value}' for name, value in found.items())}"
    others = (
        "; or give fit the dataset itself, of which each process then reads its own rows: fit(step, state, dataset, "
        "batch_size=...)."
    )
    if not step.options.local_batches and next(iter(found.values())) > 1:
        raise ValueError(
            f"{caller()}: {said}, so that each process would give other rows, but without local_batches each gives "
            "whole batches, the same as the others. make_train_step(..., local_batches=True), and num_replicas, rank = "
            f"data_shard(mesh); or use a sampler of the whole data{others}"
        )
    if step.options.local_batches and tuple(found.values()) != (shard := HostRows.of(step.layout).shard()):
        raise ValueError(
            f"{caller()}: {said}, but data_shard(mesh) is {shard}, as devices split the batch. Use num_replicas, "
            f"rank = data_shard(mesh){others}"
        )
