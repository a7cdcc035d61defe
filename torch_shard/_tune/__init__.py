"""Which mesh, plan and options a step is to have: the default compiled first, then a few others."""

from torch_shard._tune.tune import tune
from torch_shard._tune.tuning import Tuning, load_tuned
