"""A torch function per device: shard_map, pmap, vmap, tpmap, collectives, replicas."""

from torch_shard._spmd.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    fold_in_axis,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from torch_shard._spmd.maps import jax_pmap, jax_shard_map, jax_vmap
from torch_shard._spmd.replicas import assert_replica_integrity, gather_from_jax_processes, unshard
from torch_shard._spmd.tpmap import ArgKind, tpmap
