"""Entries by name: what a module holds, which mesh, which plan splits it how, which entries are stacked. Pure."""

# pyright: reportUnusedImport=false

from torch_shard._sharding.activations import RETURN, Constraint, find_moving_axes, make_matcher
from torch_shard._sharding.context import Context, ContextMode
from torch_shard._sharding.forms import Kept, Padded, Pieces
from torch_shard._sharding.in_steps import constrain_in_steps, constrain_stacks, spec_in_use
from torch_shard._sharding.mesh import (
    as_devices,
    check_current_mesh,
    check_mesh,
    find_spec_faults,
    make_mesh,
    refuse_compile_only,
    refuse_explicit,
    within_topology,
)
from torch_shard._sharding.pipeline import Pipeline, Schedule, Stages
from torch_shard._sharding.plan import PlanFn, ShardingPlan, check_plan, in_form_of, plan_for
from torch_shard._sharding.resolved import ResolvedPlan
from torch_shard._sharding.stack_rows import row_sharding, stack_sharding, take_row
from torch_shard._sharding.stacked import (
    Layout,
    Stacks,
    as_dicts,
    describe_group,
    keep_stacks,
    stack_dicts,
    whole_stacks,
)
from torch_shard._sharding.topology import memory_of
