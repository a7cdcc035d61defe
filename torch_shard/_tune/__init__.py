"""Which mesh, plan and options a step is to have: enumerated, pruned by arithmetic, the most promising compiled."""

from torch_shard._tune.tune import tune
from torch_shard._tune.tuning import Tuning, load_tuned

__all__ = ["Tuning", "load_tuned", "tune"]
