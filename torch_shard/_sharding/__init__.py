"""Entries by name: what a module holds, which mesh, which plan splits it how, which entries are stacked. Pure."""

# pyright: reportUnusedImport=false

from torch_shard._sharding.activations import RETURN, Constraint, find_moving_axes, make_matcher
from torch_shard._sharding.context import Context, ContextMode
from torch_shard._sharding.entries import (
    OF_EVERY_MODULE,
    Holdings,
    LossFn,
    TensorPlaces,
    entry_places,
    gradient_hooks,
    group_ties,
    holdings,
    marked_like,
    memory_span,
    named_tensors,
    place_of,
    put_into_scripted,
    refuse_hooks,
    refuse_load_hooks,
    shared_memory,
    shared_storage,
    tied_names,
    unsaved_buffers,
    with_values,
)
from torch_shard._sharding.forms import Kept, Padded, Pieces
from torch_shard._sharding.host_memory import (
    HostTransfers,
    RowUpdate,
    is_on_host,
    is_pinned,
    pinned,
    to_device,
    to_host,
)
from torch_shard._sharding.in_steps import constrain_in_steps, constrain_stacks, spec_in_use
from torch_shard._sharding.mesh import (
    as_devices,
    axes_of,
    check_current_mesh,
    check_mesh,
    describe_mesh,
    describe_spec,
    find_spec_faults,
    has_three_axes,
    make_mesh,
    refuse_compile_only,
    refuse_explicit,
    slices_of,
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
