"""The usual ways to lay a model over devices: a mesh and a recipe each, by the names that people use for them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, pipeline, quietly, replicated, tp
from torch_shard._sharding import ShardingPlan, check_mesh, make_mesh

MICROBATCHES = 2
"""Of the usual layouts that have stages."""

Recipe = Callable[[torch.nn.Module, Mesh], ShardingPlan]
"""Makes a plan for a model on a mesh."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies over devices.

    Attributes:
        name: Of the plan.
        mesh: Its devices.
        plan: The plan, or the recipe that makes it.
        batch_spec: How a batch is split; None for what the plan says.
        is_usual: Whether it was not asked for as such, so that it may not fit the model.
        accumulate_steps: Number of microbatches.
    """

    name: str
    mesh: Mesh
    plan: ShardingPlan | Recipe
    batch_spec: PartitionSpec | None = None
    is_usual: bool = False
    accumulate_steps: int = 1

    def plan_for(self, model: torch.nn.Module) -> ShardingPlan:
        """The plan of a model."""
        if isinstance(self.plan, ShardingPlan):
            return self.plan
        with quietly():
            return self.plan(model, self.mesh)


def _in_sequence(model: torch.nn.Module, mesh: Mesh) -> ShardingPlan:
    return fsdp_tp(model, mesh, sequence=True)


def _in_context(model: torch.nn.Module, mesh: Mesh) -> ShardingPlan:
    return fsdp_tp(model, mesh, tp=None, context="context")


def _in_stages(model: torch.nn.Module, mesh: Mesh) -> ShardingPlan:
    return pipeline(replicated(model, mesh))


def _in_stages_tp(model: torch.nn.Module, mesh: Mesh) -> ShardingPlan:
    return pipeline(tp(model, mesh))


_AXES: Mapping[str, Mapping[str, int]] = {
    "dp": {"batch": 0},
    "fsdp": {"batch": 0},
    "hsdp": {"replica": 2, "batch": 0},
    "fsdp_tp": {"batch": 0, "model": 2},
    "tp_sequence": {"batch": 2, "model": 0},
    "context": {"batch": 2, "context": 0},
    "expert": {"batch": 2, "model": 0},
    "stage": {"batch": 0, "stage": 2},
    "stage_tp": {"batch": 0, "stage": 2, "model": 2},
}
"""Sizes of the axes of each usual layout: of an odd number of devices 1 in place of 2; 0 is what is left of them."""

USUAL: Mapping[str, Recipe] = {
    "dp": replicated,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "fsdp_tp": fsdp_tp,
    "tp_sequence": _in_sequence,
    "context": _in_context,
    "expert": expert,
    "stage": _in_stages,
    "stage_tp": _in_stages_tp,
}


def _usual_mesh(name: str) -> Mesh:
    """The mesh of a usual layout, of all devices."""
    left, sizes = jax.device_count(), dict(_AXES[name])
    for axis, size in sizes.items():
        if size:
            sizes[axis] = size if left % size == 0 else 1
            left //= sizes[axis]
    return make_mesh(None, topology=None, **{axis: size or left for axis, size in sizes.items()})


def layouts_of(plans: PyTree, meshes: PyTree, batch_spec: PartitionSpec | None) -> list[Layout]:
    """What `ts.prove` is asked for.

    Args:
        plans: As `ts.prove` takes them.
        meshes: As `ts.prove` takes them.
        batch_spec: For all of them.
    """
    chosen = _plans(plans)
    if meshes is None:
        if own := [name for name in chosen if chosen[name] is not USUAL.get(name)]:
            raise ValueError(f"{caller()}: give meshes=[...] for the plans {', '.join(own)}: where they are to lie.")
        pairs = [(name, _usual_mesh(name)) for name in chosen]
    else:
        given = [meshes] if isinstance(meshes, Mesh) else meshes
        check_kind("meshes", given, Sequence)
        pairs = [(name, check_mesh(mesh)) for mesh in cast(Sequence[Mesh], given) for name in chosen]
    in_parts = (_in_stages, _in_stages_tp)
    return [
        Layout(name, mesh, chosen[name], batch_spec, plans is None, MICROBATCHES if chosen[name] in in_parts else 1)
        for name, mesh in pairs
    ]


def _plans(given: PyTree) -> Mapping[str, ShardingPlan | Recipe]:
    if given is None:
        return USUAL
    if isinstance(given, Mapping):
        for name, plan in cast(Mapping[object, object], given).items():
            check_kind("a name in plans", name, str)
            if not isinstance(plan, ShardingPlan) and not callable(plan):
                raise TypeError(
                    f"{caller()}: plans[{name!r}] must be a ShardingPlan, or a function of a model and a mesh that "
                    f"makes one, such as ts.plans.fsdp; got {type(plan).__name__}."
                )
        return cast(Mapping[str, ShardingPlan | Recipe], given)
    names = [given] if isinstance(given, str) else given
    check_kind("plans", names, Sequence, hint='Plans of your own have names: {"mine": plan}.')
    if strange := [name for name in cast(Sequence[object], names) if name not in USUAL]:
        raise ValueError(
            f"{caller()}: plans has {strange[0]!r}, which is none of {', '.join(map(repr, USUAL))}. Plans of your own "
            'have names: plans={"mine": plan}, meshes=[mesh].'
        )
    return {name: USUAL[name] for name in cast(Sequence[str], names)}
