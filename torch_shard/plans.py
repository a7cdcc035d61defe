"""Recipes and plans of other libraries: each function returns a `ShardingPlan` that says for every entry why.

A plan prints as a table of rules, specs and reasons. `plan | {"lm_head.weight": P()}` is the same plan with an entry of
your own.
"""

from torch_shard._common.other_names import OF_PLANS
from torch_shard._plans import (
    expert,
    from_dtensor,
    from_hf,
    fsdp,
    fsdp_tp,
    hsdp,
    pipeline,
    replicated,
    tp,
)

__all__ = [
    "expert",
    "from_dtensor",
    "from_hf",
    "fsdp",
    "fsdp_tp",
    "hsdp",
    "pipeline",
    "replicated",
    "tp",
]


def __getattr__(name: str) -> object:
    if answer := OF_PLANS.get(name):
        raise AttributeError(f"torch_shard.plans has no {name}: {answer}")
    raise AttributeError(f"torch_shard.plans has no {name}. It has {', '.join(__all__)}.")
