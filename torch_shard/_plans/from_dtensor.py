"""Plans of `torch.distributed.tensor.parallel.parallelize_module`, read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.validate import check_kind, check_module
from torch_shard._plans.decisions import Axes, check_axes, listed, places_with_globs, plan_of
from torch_shard._sharding import ShardingPlan, check_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

logger = logging.getLogger(__name__)


@error_prefix("plans.from_dtensor")
def from_dtensor(
    model: nn.Module,
    mesh: Mesh,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle],
    *,
    tp: str = "model",
    fsdp: Axes | None = None,
    batch_spec: PartitionSpec | None = None,
    ndim: int | Mapping[str, int] = 3,
    strict: bool = False,
) -> ShardingPlan:
    """Read a plan of PyTorch's `parallelize_module`: its styles by the names of modules.

    Parameters are split as there (`ColwiseParallel` and `RowwiseParallel` of Linear and Embedding layers). Desired and
    output layouts become `activations` of the plan; `input_layouts` say there how a local tensor is to be read, which
    is nothing here. The model is the one for one device: heads are counted as a whole, not divided by the number of
    devices, and `use_local_output` has no meaning. `loss_parallel()` needs no counterpart: give the last layer
    `output_layouts=Shard(-1)`, and the loss is computed on logits that stay split.

    Args:
        model: Any module, on the meta device too: names, classes and shapes alone are read.
        mesh: Where it will lie.
        parallelize_plan: Styles by name of module, each token a pattern (`"layers.*.attn"`); or one, for the model.
        tp: The axis that stands for the one-dimensional `DeviceMesh` there.
        fsdp: The axis along which parameters are stored in pieces, as `fully_shard` does it after `parallelize_module`;
            here along the first whole dim that divides. None leaves them as the styles do.
        batch_spec: How activations are split over other axes, as the step takes it. By default the first dim is split
            over `"batch"`, if the mesh has this axis.
        ndim: The rank of activations, for `Shard(-1)` and `Replicate()` do not say it: of all, or by name or glob of
            modules (3 for the others). What an embedding takes has one dim less.
        strict: Whether a key that matches no module, and a parameter that does not divide, are errors. Else they are
            listed in a warning of the logger: a key does nothing, as there; a parameter stays whole, where there the
            last device has less.

    Raises:
        TypeError: `parallelize_plan` is neither a style nor a mapping of them; `tp` is no name, `ndim` no number.
        ValueError: The mesh lacks an axis; a style has no meaning here or for a module of this class, or two split one
            parameter; a layout does not fit the module's arguments or `ndim`; or what `strict` refuses. All together.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> mesh = ts.make_mesh(batch=4, model=2)
        >>> plan = ts.plans.from_dtensor(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> plan.rules["2.weight"], plan.activations["0"]
        (P(None, 'model'), P('batch', None, 'model'))
    """
    from torch_shard._plans.dtensor_styles import Reader  # whose import takes a second, which only who uses it pays

    model = check_module("model", model)
    check_kind("tp", tp, str)
    check_axes(check_mesh(mesh), tp=tp, fsdp=fsdp)
    check_kind("batch_spec", batch_spec, PartitionSpec | None)
    if batch_spec is None:
        batch_spec = PartitionSpec("batch") if "batch" in mesh.shape and tp != "batch" else PartitionSpec()
    reader = Reader(model, mesh, tp, batch_spec, ndim)
    reader.read(parallelize_plan)
    if reader.unmatched and strict:
        reader.faults += [f'"{key}" matches no module.' for key in reader.unmatched]
    if reader.faults:
        num = len(reader.faults)
        raise ValueError(listed(f"{num} {'thing' if num == 1 else 'things'} cannot be read.", reader.faults))
    if reader.unmatched:
        logger.warning("%s: these keys match no module, and do nothing: %s", caller(), ", ".join(reader.unmatched))
    activations = places_with_globs(reader.constraints, model)
    return plan_of(model, reader.decide(fsdp), strict=strict, activations=activations)
