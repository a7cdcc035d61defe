"""Plans that look at nothing of a model."""

from jax.sharding import PartitionSpec

from torch_shard._sharding import ShardingPlan


def replicated() -> ShardingPlan:
    """A plan that keeps every entry whole on each device: data parallelism.

    Example:
        >>> import torch_shard as ts
        >>> ts.plans.replicated()
        ShardingPlan({'**': P()})
    """
    return ShardingPlan({"**": PartitionSpec()}, reasons={"**": "data parallel: whole on each device"})
