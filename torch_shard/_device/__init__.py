"""The torch device `jax`: eager tensors that are jax.Arrays, and how tensors, modules and batches get onto the mesh."""

from torch_shard._device.backend import disable_globally, enable_globally, jax_device
from torch_shard._device.dispatch import register_device
from torch_shard._device.host_rows import GatheredLayout, HostRows, LocalLayout, data_shard
from torch_shard._device.placement import (
    BatchLayout,
    gather,
    place,
    put,
    put_rows,
    refuse_meta,
    refuse_wide,
    to_cpu,
    to_host_by_name,
)
from torch_shard._device.replay_rng import ReplayRNG
from torch_shard._device.tensor import JaxTensor, Source, Storage, replace_in_place, to_array, wrap_array
