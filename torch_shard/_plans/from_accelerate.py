"""What a `ParallelismConfig` of accelerate asks for: a mesh, a plan and how the batch is split."""

from __future__ import annotations

import os
from collections.abc import Sequence

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.types import Device
from torch_shard._common.validate import check_module, is_integer
from torch_shard._plans.decisions import listed
from torch_shard._plans.from_hf import Rules, from_hf
from torch_shard._plans.recipes import fsdp, replicated
from torch_shard._sharding import ShardingPlan, make_mesh

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""In the order in which accelerate lays them out."""


@error_prefix("plans.from_accelerate")
def from_accelerate(
    model: nn.Module,
    parallelism_config: object = None,
    *,
    devices: Sequence[Device] | None = None,
    topology: str | None = None,
    strict: bool = False,
) -> tuple[Mesh, ShardingPlan, PartitionSpec]:
    """Read the `ParallelismConfig` of accelerate, or what `accelerate launch` put into the environment for one.

    The mesh has the axes `dp_replicate`, `dp_shard`, `cp`, `sp` and `tp`, in this order, as far as their size is more
    than 1. Parameters are split over `dp_shard` and `cp` as one axis (FSDP2), or with `sp`, as ZeRO of DeepSpeed does
    it; over `tp` by the model's own `tp_plan` (`from_hf`). Rows of the batch are split over `dp_replicate` and
    `dp_shard`, its second dim, the sequence, over `cp` or `sp`. How attention then communicates is XLA's choice:
    handlers and backends have no meaning here. If all sizes are 1, every device has rows of its own, and parameters are
    split over all of them if `accelerate launch` was asked for FSDP.

    Args:
        model: As `fsdp` takes it; for `tp` a model of transformers.
        parallelism_config: Sizes are read from its attributes `dp_replicate_size`, `dp_shard_size`, `cp_size`,
            `sp_size` and `tp_size`; where it is or has None, from `PARALLELISM_CONFIG_DP_SHARD_SIZE` and its like.
        devices: As `make_mesh` takes them.
        topology: As `make_mesh` takes it.
        strict: As `fsdp` takes it.

    Returns:
        What `make_train_step` takes as `mesh`, `plan` and `batch_spec`.

    Raises:
        TypeError: The config has none of these attributes.
        ValueError: A size is no positive integer, both `cp` and `sp` are more than 1, there are not as many devices;
            or, for `tp`, the model has no `tp_plan`. Or the launcher was asked for what sizes alone can say.

    Example:
        >>> import torch, types, torch_shard as ts
        >>> config = types.SimpleNamespace(dp_shard_size=4, cp_size=2)  # or a ParallelismConfig
        >>> mesh, plan, batch_spec = ts.plans.from_accelerate(torch.nn.Linear(8, 8), config)
        >>> dict(mesh.shape), plan.rules["weight"], batch_spec
        ({'dp_shard': 4, 'cp': 2}, P(('dp_shard', 'cp'), None), P('dp_shard', 'cp'))
    """
    model = check_module("model", model)
    sizes = {axis: size for axis, size in _sizes(parallelism_config).items() if size > 1}
    mesh = make_mesh(devices, topology=topology, **(sizes or {_only_axis(): -1}))
    stored = tuple(axis for axis in ("dp_shard", "cp", "sp") if axis in mesh.shape)
    if "tp" in mesh.shape and not Rules(model, "tp_plan").plans:
        raise ValueError(
            f"{caller()}: tp_size={mesh.shape['tp']}, and {type(model).__name__} has no tp_plan, as models of "
            "transformers have one. Use tp_size=1, or make_mesh and a recipe: ts.plans.fsdp_tp(model, mesh)."
        )
    if "tp" in mesh.shape:
        plan = from_hf(model, mesh, tp="tp", fsdp=stored or None, strict=strict)
    else:
        plan = fsdp(model, mesh, fsdp=stored, strict=strict) if stored else replicated()
    rows = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in mesh.shape)
    sequence = [axis for axis in ("cp", "sp") if axis in mesh.shape]
    return mesh, plan, PartitionSpec(rows, *sequence)


def _only_axis() -> str:
    """The axis of all devices, where no size is more than 1: what `accelerate launch` was asked for decides."""
    environ = os.environ
    engine = next(
        (name for name in ("DEEPSPEED", "MEGATRON_LM") if environ.get(f"ACCELERATE_USE_{name}") == "true"), ""
    )
    if engine:
        raise ValueError(
            f"{caller()}: the launcher was asked for {engine} (ACCELERATE_USE_{engine}=true), whose stages a mesh does "
            "not say. Give a ParallelismConfig with sizes (dp_shard_size for ZeRO-3), or make_mesh and a recipe: "
            "ts.plans.fsdp(model, mesh), and for ZeRO-1 that as optimizer_plan=."
        )
    if environ.get("ACCELERATE_USE_FSDP", "").lower() not in ("true", "1", "yes"):
        return "dp_replicate"
    strategy = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    if strategy in ("NO_SHARD", "3"):
        return "dp_replicate"
    if strategy not in ("FULL_SHARD", "1", "TRUE", "FALSE"):
        raise ValueError(
            f"{caller()}: the launcher was asked for FSDP with FSDP_SHARDING_STRATEGY={strategy}, which says no sizes. "
            "Give a ParallelismConfig: dp_replicate_size and dp_shard_size for HYBRID_SHARD."
        )
    return "dp_shard"


def _sizes(config: object) -> dict[str, int]:
    """The size of each axis."""
    attributes = [f"{axis}_size" for axis in AXES]
    if config is not None and not any(hasattr(config, name) for name in attributes):
        raise TypeError(
            f"{caller()}: parallelism_config must be a ParallelismConfig of accelerate, or have some of its attributes "
            f"{', '.join(attributes)}; got {type(config).__name__}."
        )
    found: dict[str, object] = {}
    for axis in AXES:
        variable = f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"
        given: object = getattr(config, f"{axis}_size", None)
        text = os.environ.get(variable, "1")
        found[axis] = given if given is not None else int(text) if text.strip().isdecimal() else text
    sizes = {axis: size for axis, size in found.items() if is_integer(size) and size > 0}
    faults = [f"{axis}_size must be a positive integer, got {found[axis]!r}." for axis in AXES if axis not in sizes]
    if sizes.get("cp", 1) > 1 and sizes.get("sp", 1) > 1:
        faults.append(f"cp_size={sizes['cp']} and sp_size={sizes['sp']} both split the sequence. Choose one.")
    if faults:
        raise ValueError(listed("sizes of the config cannot be read.", faults))
    return sizes
