"""A module's values computed straight on their shards."""

from torch_shard._materialize.materialize import materialize
