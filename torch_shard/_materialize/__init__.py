"""A module's values computed straight on their shards."""
