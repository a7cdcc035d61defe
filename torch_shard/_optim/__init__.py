"""Optax optimizers on parameters by name and on stacks of them: pure JAX."""

from torch_shard._optim.by_name import run_by_name
from torch_shard._optim.optimizer import check_optimizer, in_optimizer

__all__ = ["check_optimizer", "in_optimizer", "run_by_name"]
