"""A torch function per device: shard_map, pmap, vmap, tpmap, collectives, replicas."""
