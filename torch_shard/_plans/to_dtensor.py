"""Plans written as styles of `torch.distributed.tensor.parallel.parallelize_module`."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.validate import check_kind
from torch_shard._common.wrappers import check_module
from torch_shard._plans.decisions import Axes, check_axes, with_globs
from torch_shard._plans.from_dtensor import from_dtensor, layouts_of, positional
from torch_shard._sharding import ResolvedPlan, ShardingPlan, axes_of, check_mesh, describe_spec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

    from torch_shard._plans.dtensor_layouts import Layouts

logger = logging.getLogger(__name__)


@error_prefix("plans.to_dtensor")
def to_dtensor(
    plan: ShardingPlan,
    model: nn.Module,
    mesh: Mesh,
    *,
    tp: str = "model",
    fsdp: Axes | None = None,
    batch_spec: PartitionSpec | None = None,
    ndim: int | Mapping[str, int] = 3,
) -> tuple[dict[str, "ParallelStyle"], list[str]]:
    """Write a plan for PyTorch's `parallelize_module`, and say what cannot be written.

    The styles keep activations as DTensors between modules (`use_local_output=False`), so that the model stays the one
    for one device. A plain tensor that enters a module counts as whole, but for `SequenceParallel`, which takes
    DTensors or each device's part. Parameters that no style names stay plain tensors: run the model under
    `torch.distributed.tensor.experimental.implicit_replication()`, which lets them meet DTensors. `from_dtensor` reads
    the styles as this plan, but for what is listed.

    Args:
        plan: Any plan for this model.
        model: Whose modules are named.
        mesh: Where the plan would lie.
        tp: The axis that becomes the one-dimensional `DeviceMesh` there.
        fsdp: The axis that is left to `fully_shard`, which is to be called after `parallelize_module`.
        batch_spec: As `from_dtensor` takes it.
        ndim: As `from_dtensor` takes it.

    Returns:
        The `parallelize_plan`, and a line for each split of an entry or of an activation that it cannot say; these are
        a warning of the logger too.

    Raises:
        ValueError: The mesh lacks an axis, or the plan does not fit the model.

    Example:
        >>> import torch, torch_shard as ts
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> mesh = ts.make_mesh(batch=4, model=2)
        >>> styles, unsaid = ts.plans.to_dtensor(ts.plans.tp(mlp, mesh), mlp, mesh)
        >>> {name: type(style).__name__ for name, style in styles.items()}, unsaid
        ({'0': 'ColwiseParallel', '2': 'RowwiseParallel'}, [])
    """
    check_kind("plan", plan, ShardingPlan)
    model = check_module("model", model)
    check_axes(check_mesh(mesh), tp=tp, fsdp=fsdp)
    check_kind("batch_spec", batch_spec, PartitionSpec | None)
    layouts = layouts_of(mesh, tp, batch_spec, ndim)
    if faults := layouts.find_faults(model, mesh):
        raise ValueError("\n".join([f"{caller()}: cannot be written.", "", *(f"  {fault}" for fault in faults)]))
    resolved = plan.resolve(model, mesh)
    styles = dict(_styles(model, resolved, layouts))
    keys = with_globs({path: repr(style) for path, style in styles.items()}, [n for n, _ in model.named_modules()])
    by_text = {repr(style): style for style in styles.values()}
    written = {key: by_text[text] for key, text in keys.items()}
    read = from_dtensor(model, mesh, written, tp=tp, fsdp=fsdp, batch_spec=batch_spec, ndim=ndim)
    unsaid = list(_differences(resolved, read.resolve(model, mesh)))
    if unsaid:
        logger.warning("%s: %d splits cannot be said:\n%s", caller(), len(unsaid), "\n".join(unsaid))
    return written, unsaid


def _styles(model: nn.Module, resolved: ResolvedPlan, layouts: "Layouts") -> Iterator[tuple[str, "ParallelStyle"]]:
    """A style for each module of which the plan says something that one can say."""
    asked: dict[str, dict[str, PartitionSpec]] = {}
    for constraint in resolved.activations:
        module, _, place = str(constraint.place).partition(":")
        asked.setdefault(module, {})[place] = constraint.spec
    for path, module in model.named_modules():
        found = {
            place: placement
            for place, spec in asked.get(path, {}).items()
            if (placement := layouts.placement_of(spec, layouts.rank(path, module, place))) is not None
        }
        style = _splitting(module, _split_dim(path, resolved, layouts.tp), found) or _preparing(module, found)
        if style is not None:
            yield path, style


def _split_dim(path: str, resolved: ResolvedPlan, tp: str) -> int | None:
    """Along which dim the weight of a module is split."""
    name = f"{path}.weight" if path else "weight"
    spec = resolved[name].spec if name in resolved else ()
    return next((dim for dim, part in enumerate(spec) if tp in axes_of((part,))), None)


def _splitting(module: nn.Module, dim: int | None, asked: "Mapping[str, Placement]") -> "ParallelStyle | None":
    """A style that makes the parameters of a module DTensors."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    if isinstance(module, nn.Linear | nn.Embedding) and dim is not None:
        by_rows = dim == (0 if isinstance(module, nn.Embedding) else 1)
        kind = parallel.RowwiseParallel if by_rows else parallel.ColwiseParallel
        return kind(input_layouts=Replicate(), output_layouts=asked.get(""), use_local_output=False)
    names = positional(module)
    entered, left = asked.get(names[0]) if names else None, asked.get("")
    is_leaf = next(module.children(), None) is None
    if is_leaf and len(asked) == 2 and isinstance(left, Shard) and entered == left and left.dim >= 0:
        return parallel.SequenceParallel(sequence_dim=left.dim, use_local_output=False)
    return None


def _preparing(module: nn.Module, asked: "Mapping[str, Placement]") -> "ParallelStyle | None":
    """A style for what a module takes and returns."""
    from torch.distributed.tensor import Replicate, parallel

    asked = {place: made for place, made in asked.items() if not made.is_replicate()}  # whole to whole moves nothing
    names, inputs = positional(module), {p: made for p, made in asked.items() if p and not p.startswith("return")}
    last = max((names.index(name) + 1 for name in inputs if name in names), default=0)
    wanted = tuple(inputs.get(name) for name in names[:last])
    by_name = {name: made for name, made in inputs.items() if name not in names and "." not in name}
    entering: dict[str, Any] = {
        "input_layouts": tuple(made and Replicate() for made in wanted) or None,
        "desired_input_layouts": wanted or None,
        "input_kwarg_layouts": dict.fromkeys(by_name, Replicate()) or None,
        "desired_input_kwarg_layouts": by_name or None,
    }
    if "" not in asked:
        return parallel.PrepareModuleInput(**entering, use_local_output=False) if any(entering.values()) else None
    leaving: dict[str, Any] = {"output_layouts": Replicate(), "desired_output_layouts": asked[""]}
    if not any(entering.values()):
        return parallel.PrepareModuleOutput(**leaving, use_local_output=False)
    return parallel.PrepareModuleInputOutput(**entering, **leaving, use_local_input=False, use_local_output=False)


def _differences(asked: ResolvedPlan, read: ResolvedPlan) -> Iterator[str]:
    """What the styles do not say of a plan."""
    from torch_shard._plans.dtensor_layouts import trimmed

    for name, entry in asked.entries.items():
        spec, other = entry.sharding.spec, read[name].spec
        if not entry.tied_to and trimmed(spec) != trimmed(other):
            yield f"  {name} {entry.shape}: {describe_spec(spec)}; the styles give {describe_spec(other)}"
        if entry.form is not None:
            yield f"  {name} {entry.shape}: stored as {entry.form}; a style splits what torch has"
    given = {str(c.place): c.spec for c in read.activations}
    for constraint in asked.activations:
        place = str(constraint.place)
        if place not in given or trimmed(given[place]) != trimmed(constraint.spec):
            other = describe_spec(given[place]) if place in given else "nothing"
            yield f"  {place}: {describe_spec(constraint.spec)}; the styles give {other}"
