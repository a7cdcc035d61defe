"""The usual ways to lay a model over devices: a mesh and a recipe each, by the names that people use for them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import torch
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, pipeline, replicated, tp
from torch_shard._sharding import ShardingPlan, check_mesh, make_mesh

MICROBATCHES = 2
"""Of plans that have stages."""

Recipe = Callable[[torch.nn.Module, Mesh], ShardingPlan]
"""Makes a plan for a model on a mesh."""


Layout = tuple[str, Mesh, ShardingPlan | Recipe]
"""The name of a plan, its devices, and the plan, or the recipe that makes it."""


def _in_stages(recipe: Recipe, model: torch.nn.Module, mesh: Mesh) -> ShardingPlan:
    return pipeline(recipe(model, mesh))


USUAL: Mapping[str, tuple[Recipe, Mapping[str, int]]] = {
    "dp": (replicated, {"batch": 0}),
    "fsdp": (fsdp, {"batch": 0}),
    "hsdp": (hsdp, {"replica": 2, "batch": 0}),
    "fsdp_tp": (fsdp_tp, {"batch": 0, "model": 2}),
    "tp_sequence": (functools.partial(fsdp_tp, sequence=True), {"batch": 2, "model": 0}),
    "context": (functools.partial(fsdp_tp, tp=None, context="context"), {"batch": 2, "context": 0}),
    "expert": (expert, {"batch": 2, "model": 0}),
    "stage": (functools.partial(_in_stages, replicated), {"batch": 0, "stage": 2}),
    "stage_tp": (functools.partial(_in_stages, tp), {"batch": 0, "stage": 2, "model": 2}),
}
"""Recipes and sizes of axes: of an odd number of devices 1 in place of 2; 0 is what is left of them."""


def _usual_mesh(name: str) -> Mesh:
    """The mesh of a usual layout, of all devices."""
    left, sizes = jax.device_count(), dict(USUAL[name][1])
    for axis, size in sizes.items():
        if size:
            sizes[axis] = size if left % size == 0 else 1
            left //= sizes[axis]
    return make_mesh(None, topology=None, **{axis: size or left for axis, size in sizes.items()})


def layouts_of(plans: PyTree, meshes: PyTree) -> list[Layout]:
    """What `ts.prove` is asked for.

    Args:
        plans: As `ts.prove` takes them.
        meshes: As `ts.prove` takes them.
    """
    chosen, usual = _plans(plans), {name: recipe for name, (recipe, _) in USUAL.items()}
    if meshes is None:
        if own := [name for name in chosen if chosen[name] is not usual.get(name)]:
            raise ValueError(f"{caller()}: give meshes=[...] for the plans {', '.join(own)}: where they are to lie.")
        pairs = [(name, _usual_mesh(name)) for name in chosen]
    else:
        given = [meshes] if isinstance(meshes, Mesh) else meshes
        check_kind("meshes", given, Sequence)
        pairs = [(name, check_mesh(mesh)) for mesh in cast(Sequence[Mesh], given) for name in chosen]
    return [(name, mesh, chosen[name]) for name, mesh in pairs]


def _plans(given: PyTree) -> Mapping[str, ShardingPlan | Recipe]:
    given = list(USUAL) if given is None else given
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
    return {name: USUAL[name][0] for name in cast(Sequence[str], names)}
