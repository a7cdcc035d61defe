"""Metric objects of a loss: what they are to be given comes out of the program with the metrics."""

from collections.abc import Sequence

import jax
import torch

from torch_shard._capture import MetricCall
from torch_shard._common.convert import to_host
from torch_shard._common.types import PyTree

CALLS = "calls of metric objects"
"""The name of the metric that is what they are to be given."""


def for_objects(tensors: Sequence[Sequence[torch.Tensor]]) -> dict[str, PyTree]:
    """The tensors of calls as a metric, each with a leading dim of one: microbatches are not to be averaged."""
    return {CALLS: [[tensor[None] for tensor in call] for call in tensors]} if tensors else {}


def update_objects(calls: Sequence[MetricCall], metrics: dict[str, PyTree], num_microbatches: int) -> None:
    """Make the calls, in order, with what a step has given, and take that out of its metrics."""
    given: list[list[jax.Array]] = metrics.pop(CALLS, [])
    leading = 1 if num_microbatches > 1 else 0  # the last of the leading dims
    hosts = [[to_host(array).flatten(0, leading) for array in arrays] for arrays in given]
    for index in range(num_microbatches):
        for call, tensors in zip(calls, hosts, strict=True):
            call.update([tensor[index] for tensor in tensors])
