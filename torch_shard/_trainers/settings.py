"""What the trainers of other libraries have in common on a mesh: which plan, and which options their steps take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from jax.sharding import Mesh
from torch import nn

from torch_shard._common.validate import check_kind
from torch_shard._plans import fsdp, fsdp_tp
from torch_shard._sharding import ShardingPlan

Plan = ShardingPlan | Callable[[nn.Module, Mesh], ShardingPlan]

_SAID_OTHERWISE = {
    "mesh": "mesh=",
    "plan": "plan=",
    "local_batches": "nothing: a trainer has one process",
    "compiled": "compile_cache, which finds the program by what is in it",
    "trainable": "requires_grad of the parameters",
}
"""Options of a step that no trainer takes, with what says them."""

_OF_EVALUATION = ("batch_spec", "mixed_precision", "scan_layers", "compile_cache")
"""Options of a step that its evaluation has too."""


def check_step_options(name: str, options: object, said_by_trainer: Mapping[str, str]) -> dict[str, Any]:
    """Take further options of a step, or refuse those that a trainer says in its own words.

    Args:
        name: Of the class, for errors.
        options: What a user gave as `step_options`.
        said_by_trainer: By option, what of the trainer says it.

    Raises:
        TypeError: It is no mapping, or has one of these.
    """
    check_kind("step_options", options, Mapping | None)
    checked = dict(cast(Mapping[str, Any], options or {}))
    for option, instead in {**_SAID_OTHERWISE, **said_by_trainer}.items():
        if option in checked:
            raise TypeError(f"{name}: step_options has {option!r}, which {instead} says here.")
    return checked


def resolve_plan(plan: Plan | None, model: nn.Module, mesh: Mesh) -> ShardingPlan:
    """A plan as it is, or what a function makes; by default `fsdp_tp` on a mesh with an axis `model`, else `fsdp`."""
    if isinstance(plan, ShardingPlan):
        return plan
    if plan is not None:
        return plan(model, mesh)
    recipe = fsdp_tp if "model" in mesh.axis_names else fsdp
    return recipe(model, mesh)


def precision_options(*, is_bf16: bool) -> dict[str, Any]:
    """The options of steps in the trainer's precision: bfloat16 means the policy of `torch.autocast("cuda")`."""
    if not is_bf16:
        return {}
    return {"compute_dtype": torch.bfloat16, "mixed_precision": "autocast"}


def evaluation_options(step_options: Mapping[str, Any], *, is_bf16: bool) -> dict[str, Any]:
    """The options of an evaluation beside steps with these options."""
    options = precision_options(is_bf16=is_bf16)
    for name in _OF_EVALUATION:
        if name in step_options:
            options[name] = step_options[name]
    return options
