"""Which layers of a model are the stages of a pipeline."""

from collections.abc import Collection, Iterator

import torch

from torch_shard._common.caller import caller
from torch_shard._scan.siblings import Siblings
from torch_shard._sharding import ResolvedPlan, Stages, axes_of, describe_mesh


def find_stages(
    model: torch.nn.Module,
    groups: list[Siblings],
    plan: ResolvedPlan,
    *,
    moments: ResolvedPlan,
    data_axes: Collection[str],
) -> Stages | None:
    """The layers that a plan with a pipeline splits over stages: the largest group of layers that are alike."""
    pipeline, mesh = plan.pipeline, plan.mesh
    if pipeline is None:
        return None
    groups = [group for group in groups if group.refused is None]
    if not groups:
        raise ValueError(
            f"{caller()}: a pipeline needs repeated layers, and {type(model).__name__} has no numbered siblings "
            "(nn.ModuleList, nn.Sequential) that are alike in classes, shapes and splits. Use a plan without pipeline."
        )
    chosen = max(groups, key=lambda group: _num_elements(model, group))
    layers, num = tuple(chosen.members.values()), mesh.shape[pipeline.axis]
    parts = num * pipeline.repeats
    if len(layers) % parts:
        times = f" * repeats={pipeline.repeats}" if pipeline.repeats > 1 else ""
        raise ValueError(
            f"{caller()}: the {len(layers)} layers of {chosen.path} are not a multiple of {parts} = "
            f"{pipeline.axis}={num}{times}, on mesh {describe_mesh(mesh)}. Choose a number of stages that divides them."
        )
    if fault := next(_faults(pipeline.axis, layers, plan, moments, data_axes=data_axes), None):
        raise ValueError(
            f"{caller()}: {fault} over {pipeline.axis!r}, which is the axis of the pipeline: a layer and its rows are "
            f"whole on one stage. Use other axes of mesh {describe_mesh(mesh)}."
        )
    return Stages(pipeline, num, layers)


def _faults(
    axis: str, layers: tuple[str, ...], plan: ResolvedPlan, moments: ResolvedPlan, *, data_axes: Collection[str]
) -> Iterator[str]:
    """What else is split over the axis of the stages."""
    own = tuple(f"{path}." for path in layers)
    for what, resolved in (("", plan), ("optimizer_plan: ", moments)):
        yield from (
            f"{what}{name} is split"
            for name, sharding in resolved.items()
            if name.startswith(own) and axis in axes_of(sharding.spec)
        )
    for asked in plan.activations:
        if axis in axes_of(asked.spec):
            yield f"activations: {asked.place} is split"
    if axis in data_axes:
        yield "batch_spec splits the batch"


def _num_elements(model: torch.nn.Module, group: Siblings) -> int:
    return sum(p.numel() for path in group.members.values() for p in model.get_submodule(path).parameters())
