"""One process's values for all: modules that were made differently become alike."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils

from torch_shard._common.caller import public
from torch_shard._common.wrappers import check_module
from torch_shard._hosts.processes import compare

BLOCK = 1 << 24
"""Bytes that are sent at a time."""


@public
def broadcast(model: torch.nn.Module) -> None:
    """Give every process the parameters and buffers that process 0 has; every process must call it.

    Values are written into the module's own tensors, bit for bit. With one process nothing happens.

    Args:
        model: On the CPU; of the same entries, shapes and dtypes in all processes.

    Raises:
        TypeError: It is not a module.
        ValueError: Entries are elsewhere than on the CPU, or differ between processes in name, shape or dtype.

    Example:
        >>> import torch, torch_shard as ts
        >>> model = torch.nn.Linear(4, 1)  # each process draws values of its own
        >>> ts.broadcast(model)
    """
    model = check_module("model", model)
    held = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    if elsewhere := [f"{name} ({tensor.device.type})" for name, tensor in held.items() if tensor.device.type != "cpu"]:
        raise ValueError(
            f"broadcast: entries must be on the CPU, and these are not: {', '.join(elsewhere)}. Call it before the "
            "model is moved or placed."
        )
    if jax.process_count() == 1:
        return
    facts = {f"the shape of {name}": f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in held.items()}
    compare("broadcast", facts | {"the names of the entries": ", ".join(held)})
    for tensor in held.values():
        _take_over(tensor)


def _take_over(tensor: torch.Tensor) -> None:
    """Write what process 0 has into a tensor."""
    own = tensor.detach().contiguous().reshape(-1)
    flat = own.view(torch.uint8).numpy() if own.numel() else np.zeros(0, np.uint8)
    for start in range(0, flat.size, BLOCK):
        block = np.zeros(min(BLOCK, _power_of_two(flat.size)), np.uint8)  # of few sizes: each is a program of its own
        part = flat[start : start + BLOCK]
        block[: part.size] = part
        part[:] = np.asarray(multihost_utils.broadcast_one_to_all(block))[: part.size]
    with torch.no_grad():
        tensor.copy_(own.view_as(tensor) if own.numel() else tensor)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 1).bit_length()
