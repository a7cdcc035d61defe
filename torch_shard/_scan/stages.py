"""Which layers of a model are the stages of a pipeline."""

import torch

from torch_shard._common.caller import caller
from torch_shard._scan.siblings import Siblings
from torch_shard._sharding import ResolvedPlan, Stages, axes_of, describe_mesh


def find_stages(model: torch.nn.Module, groups: list[Siblings], plan: ResolvedPlan) -> Stages | None:
    """The layers that a plan with a pipeline splits over stages: the largest group of layers that are alike.

    Args:
        model: Only its structure is read.
        groups: Its repeated layers.
        plan: Resolved for the model.

    Returns:
        None without a pipeline.

    Raises:
        ValueError: There are no such layers, they do not divide, or their entries are split over the stages too.
    """
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
    wrong = [name for name in plan if name.startswith(tuple(f"{p}." for p in layers)) and _is_split(plan, name)]
    if wrong:
        raise ValueError(
            f"{caller()}: {wrong[0]} is split over {pipeline.axis!r}, which is the axis of the pipeline: its layer is "
            f"whole on one stage. Give its rule other axes of mesh {describe_mesh(mesh)}."
        )
    return Stages(pipeline, num, layers)


def _is_split(plan: ResolvedPlan, name: str) -> bool:
    assert plan.pipeline is not None
    return plan.pipeline.axis in axes_of(plan[name].spec)


def _num_elements(model: torch.nn.Module, group: Siblings) -> int:
    return sum(p.numel() for path in group.members.values() for p in model.get_submodule(path).parameters())
