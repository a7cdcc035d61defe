"""A plan written as the `tp_plan` of transformers."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import logging
from collections.abc import Iterator, Mapping

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.validate import check_kind
from torch_shard._common.wrappers import check_module
from torch_shard._plans.decisions import Axes, Decision, check_axes, names_of, with_globs
from torch_shard._plans.from_hf import adapter, over_time
from torch_shard._plans.hf_rules import Rules, generic, is_within
from torch_shard._plans.hf_styles import STYLES
from torch_shard._sharding import ResolvedPlan, ShardingPlan, axes_of, check_mesh, describe_spec

logger = logging.getLogger(__name__)

Dims = Mapping[str, int | None]
"""Which dim of a parameter is split, by its name."""


@error_prefix("plans.to_hf")
def to_hf(
    plan: ShardingPlan, model: nn.Module, mesh: Mesh, *, tp: str = "model", fsdp: Axes | None = "batch"
) -> tuple[dict[str, str], list[str]]:
    """Write a plan as the `tp_plan` of a model of transformers, and say what cannot be written.

    Where a part of the model is split as its own `tp_plan` has it, the rules of that are kept; elsewhere layers take
    and return whole activations (`colwise_gather_output`, `rowwise_split_input`), which is right there wherever a layer
    stands, and what the plan keeps whole is `replicate`. So it is an override as `DistributedConfig(tp_plan=...)` takes
    it, and a `model.tp_plan`, which `from_hf` reads as this plan, but for what is listed.

    Args:
        plan: Any plan for this model.
        model: Whose parameters are named: of transformers, or a module that holds one model of it, as adapters do.
        mesh: Where the plan would lie.
        tp: The axis that becomes tensor parallelism there.
        fsdp: The axis that is left to its `fsdp_plan`, which splits first dims; None for none.

    Returns:
        The `tp_plan`, and a line for each split of an entry or of an activation that it cannot say; these are a warning
        of the logger too.

    Raises:
        ValueError: The mesh lacks an axis, the plan does not fit the model, or it holds several models of transformers.

    Example:
        >>> import torch, torch_shard as ts
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))
        >>> mesh = ts.make_mesh(batch=4, model=2)
        >>> written, unsaid = ts.plans.to_hf(ts.plans.fsdp_tp(model, mesh), model, mesh)
        >>> written["model.layers.*.self_attn.o_proj"], unsaid
        ('rowwise', [])
    """
    check_kind("plan", plan, ShardingPlan)
    model = check_module("model", model)
    check_kind("tp", tp, str)
    check_axes(check_mesh(mesh), tp=tp, fsdp=fsdp)
    own = Rules.of(model, "tp_plan")
    if len(own.plans) > 1:
        found = ", ".join(f'"{owner}"' for owner in own.plans)
        raise ValueError(f"{caller()}: the model holds several with a tp_plan: {found}. Write the plan of each.")
    own = own if own else Rules({"": {}})
    resolved = plan.resolve(model, mesh)
    wanted = {name: _split_dim(resolved[name].spec, tp) for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = _kept(model, own, wanted)
    whole = {rule.key: "replicate" for rule in own.all}
    written = Rules({owner: whole | kept | _plain(model, own, kept, wanted) for owner in own.plans})
    unsaid = list(_unsaid(model, resolved, wanted, written, tp=tp, fsdp=names_of(fsdp or ())))
    if unsaid:
        logger.warning("%s: %d splits cannot be said:\n%s", caller(), len(unsaid), "\n".join(unsaid))
    return {rule.key: rule.style for rule in written.all}, unsaid


def _split_dim(spec: PartitionSpec, tp: str) -> int | None:
    """The dim that is split over the axis, before it is over others."""
    return next((dim for dim, part in enumerate(spec) if axes_of((part,))[:1] == [tp]), None)


def _dims(model: nn.Module, rules: Rules) -> Dims:
    """What rules split, as transformers does it."""
    found: dict[str, int | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rule = rules.of_parameter(name)
        style = STYLES.get(rule.style) if rule else None
        found[name] = style.dim_of(name.rpartition(".")[2], parameter.ndim) if style else None
    return found


def _kept(model: nn.Module, own: Rules, wanted: Dims) -> dict[str, str]:
    """Rules of the model's own for its parts that are split as these say: attention, a block of an MLP."""
    dims = _dims(model, own)
    keys = {name: generic(own.called(name)[1]) for name in dims}
    others = {key for name, key in keys.items() if dims[name] != wanted[name] and ".lora_" not in name}
    modules = {generic(own.called(name)[1]) for name, _ in model.named_modules()}

    def part(key: str) -> str:
        module = key if key in modules else key.rpartition(".")[0]
        return module.rpartition(".")[0] or module

    return {rule.key: rule.style for rule in own.all if not any(is_within(key, part(rule.key)) for key in others)}


def _plain(model: nn.Module, own: Rules, kept: Mapping[str, str], wanted: Dims) -> dict[str, str]:
    """Rules for layers of which none is kept, right wherever they stand."""
    found: dict[str, set[str | None]] = {}
    for path, layer in model.named_modules():
        key, weight = generic(own.called(path)[1]), f"{path}.weight" if path else "weight"
        is_asked = weight in wanted and key not in kept and ".lora_" not in path
        if is_asked and any(is_within(path, owner) for owner in own.plans):
            found.setdefault(key, set()).add(_style_of(layer, wanted[weight]))
    return {key: style for key, styles in found.items() if len(styles) == 1 for style in styles if style}


def _style_of(layer: nn.Module, dim: int | None) -> str | None:
    if isinstance(layer, nn.Embedding):
        return {0: "embedding_rowwise", 1: "embedding_colwise"}.get(-1 if dim is None else dim)
    if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
        return {0: "colwise_gather_output", 1: "rowwise_split_input"}.get(-1 if dim is None else dim)
    return None


def _unsaid(
    model: nn.Module, resolved: ResolvedPlan, wanted: Dims, written: Rules, *, tp: str, fsdp: tuple[str, ...]
) -> Iterator[str]:
    """What a reader of these rules does not learn of the plan."""
    entries = dict(model.named_parameters(remove_duplicate=False))
    read = {name: Decision(_spec(dim, tp), "") for name, dim in _dims(model, written).items()}
    read |= {name: adapter(name, entries, read) for name in read if ".lora_" in name}
    packed = {name: _pieces(name, written) for name in read}
    told: dict[str, str] = {}
    for name, entry in resolved.entries.items():
        spec, dim = entry.sharding.spec, _split_dim(read[name].spec, tp) if name in read else None
        others = [axis for axis in axes_of(spec) if axis not in (tp, *fsdp)]
        if not entry.tied_to and (others or dim != wanted.get(name) or (name not in wanted and any(spec))):
            told[name] = f"{entry.shape}: {describe_spec(spec)}; its rules give {describe_spec(_spec(dim, tp))}"
        elif entry.form is not None and packed.get(name) != getattr(entry.form, "num", None):
            told[name] = f"{entry.shape}: stored as {entry.form}"
    for name, text in with_globs(told, resolved.entries).items():
        yield f"  {name} {text}"
    said = over_time(model, written, tp)
    rules = {constraint.rule: constraint.spec for constraint in resolved.activations}
    for place, spec in rules.items():
        if said.get(place) != spec:
            yield f"  {place}: an activation, {describe_spec(spec)}"


def _pieces(name: str, rules: Rules) -> int:
    rule = rules.of_parameter(name)
    return STYLES[rule.style].pieces if rule else 1


def _spec(dim: int | None, tp: str) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*(None for _ in range(dim)), tp)
