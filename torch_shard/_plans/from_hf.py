"""The plan that a transformers model has for itself: its `tp_plan`, `ep_plan` and `fsdp_plan`."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import error_prefix
from torch_shard._common.validate import check_kind
from torch_shard._common.wrappers import check_module
from torch_shard._plans.decisions import (
    Axes,
    Decision,
    check_axes,
    completed,
    find_uneven,
    listed,
    names_of,
    places_with_globs,
    plan_of,
)
from torch_shard._plans.hf_rules import FSDP_STYLES, STYLES, Rule, Rules
from torch_shard._plans.layers import LORA
from torch_shard._plans.roles import Role, roles_of
from torch_shard._sharding import Pieces, ShardingPlan, check_mesh


@error_prefix("plans.from_hf")
def from_hf(
    model: nn.Module,
    mesh: Mesh,
    *,
    tp: Axes | None = "model",
    fsdp: Axes | None = "batch",
    ep: Axes | None = None,
    strict: bool = False,
) -> ShardingPlan:
    """Read the plan that a model of transformers has for itself: `model.tp_plan`, `model.ep_plan`, `model.fsdp_plan`.

    Names are looked up as transformers does it, so that a rule of its which matches nothing is no error. With `fsdp`
    parameters are split once more, along the first of their dims that divides, but for small vectors. Heads of
    attention are never split inside: where they do not divide, their projections stay whole over `tp`. LoRA adapters
    (peft) follow the layer that they adapt.

    Args:
        model: A `PreTrainedModel`, or a module that holds one; it may be on the meta device. It is not changed.
        mesh: A mesh of Auto axes.
        tp: Axis of the rules of `tp_plan`; None leaves them out.
        fsdp: Axis along which parameters are stored in pieces and gathered for use; None leaves them whole there.
        ep: Axis over which experts are distributed, by the rules of `ep_plan`; it may be that of `tp` or `fsdp`. None
            leaves these rules out.
        strict: True makes it an error that a parameter could not be split as its rule asks; False logs a warning
            which lists them.

    Returns:
        A plan with the reason of each rule. Its `activations` speak of `sequence_parallel` modules alone: what others
        take and return is split as their parameters are, by XLA.

    Raises:
        TypeError: `model` is not a module or `mesh` not a Mesh.
        ValueError: The model has no such plan, or a style in it is unknown; the mesh lacks an axis; or, with `strict`,
            parameters cannot be split.

    Example:
        >>> import torch, torch_shard as ts
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))
        >>> plan = ts.plans.from_hf(model, ts.make_mesh(batch=4, model=2))
        >>> plan.rules["model.layers.*.self_attn.q_proj.weight"]
        P('model', 'batch')
    """
    model = check_module("model", model)
    check_kind("strict", strict, bool)
    check_mesh(mesh)
    check_axes(mesh, tp=tp, fsdp=fsdp)
    check_axes(mesh, ep=ep)  # it may be another's
    rules = {name: Rules.of(model, f"{name}_plan") for name in ("tp", "ep", "fsdp")}
    asked = {"tp": tp, "ep": ep, "fsdp": fsdp}
    if faults := [fault for name, axes in asked.items() if axes is not None for fault in _find_faults(name, rules)]:
        raise ValueError(listed(f"{type(model).__name__} has no plan that can be read.", faults))
    reader = _Reader(mesh, tp, ep, rules["tp"], rules["ep"], roles_of(model))
    named = model.named_parameters(remove_duplicate=False)
    split = {name: reader.split(name, p) for name, p in named if LORA not in name}
    above = {name: rules["fsdp"].above(name) for name in split} if fsdp else {}
    notes = {name: FSDP_STYLES[rule.style] for name, rule in above.items() if rule}
    decisions = completed(model, split, mesh, fsdp=fsdp, notes=notes)
    activations = {} if tp is None else _over_time(model, rules["tp"], tp)
    return plan_of(model, decisions, strict=strict, activations=activations)


def _find_faults(argument: str, rules: Mapping[str, Rules]) -> list[str]:
    """What cannot be read of a plan."""
    styles, recipe = FSDP_STYLES if argument == "fsdp" else STYLES, "expert" if argument == "ep" else argument
    faults = [
        f'{argument}_plan["{rule.key}"] is "{rule.style}", which is none of its styles: {", ".join(styles)}. '
        f"Change it in model.{argument}_plan, or pass {argument}=None."
        for rule in rules[argument].all
        if rule.style not in styles
    ]
    if not rules[argument] and (argument != "fsdp" or not rules["tp"]):
        faults.append(
            f"it has no {argument}_plan. Use ts.plans.{recipe}(model, mesh), which goes by what layers are, "
            f"or pass {argument}=None."
        )
    return faults


# With Megatron's constraints on what all layers take and return, a Llama compiles for TPU (v5e:4x4, two layers) to the
# same collectives, 110 of 45.9 MiB; with the logits gathered, as `colwise_gather_output` asks, to 58.9 MiB.
def _over_time(model: nn.Module, rules: Rules, tp: Axes) -> dict[str, PartitionSpec]:
    """What modules of the style `sequence_parallel` take and return, by place."""
    found: dict[str, PartitionSpec] = {}
    for name, module in model.named_modules():
        rule = rules.of_module(name)
        if rule and rule.style == "sequence_parallel":
            for place in (name, f"{name}:{next(iter(inspect.signature(module.forward).parameters))}"):
                found[place] = PartitionSpec(PartitionSpec.UNCONSTRAINED, tp)
    return places_with_globs(found, model)


@dataclass(frozen=True)
class _Reader:
    """The rules of a model, and what they come to on a mesh."""

    mesh: Mesh
    tp: Axes | None
    ep: Axes | None
    tp_rules: Rules
    ep_rules: Rules
    roles: Mapping[str, Role]

    def split(self, name: str, entry: torch.Tensor) -> Decision:
        """How the rules of `ep_plan` and `tp_plan` split a parameter."""
        spec, reasons, faults, form = PartitionSpec(), list[str](), list[str](), None
        for axes, rule in ((self.ep, self.ep_rules.of_parameter(name)), (self.tp, self._tp_rule(name))):
            if axes is None or rule is None:
                continue
            style = STYLES[rule.style]
            dim = style.dim_of(name.rpartition(".")[2], entry.ndim)
            fault = "" if dim is None else self._fault(name, entry, dim, axes=axes, rule=rule)
            faults += [fault] if fault else []
            note = "" if fault else style.note
            if dim is not None and dim < len(spec) and spec[dim] is not None:
                note = "the dim is split already"
            elif dim is not None and not fault:
                spec = _with(spec, dim, axes)
                form = Pieces(style.pieces, dim=dim) if style.pieces > 1 else form
            reasons.append(rule.style + (f" ({note})" if note else ""))
        return Decision(spec, "; ".join(reasons) or "no rule of tp_plan or ep_plan", "; ".join(faults), form)

    def _tp_rule(self, name: str) -> Rule | None:
        """The rule of `tp_plan`, which does not count for experts that are distributed over the same axes."""
        rule = self.tp_rules.of_parameter(name)
        shared = set(names_of(self.tp)) & set(names_of(self.ep))
        return None if rule and shared and self.ep_rules.holds(rule.key) else rule

    def _fault(self, name: str, entry: torch.Tensor, dim: int, *, axes: Axes, rule: Rule) -> str:
        """What keeps a dim from being split."""
        role = self.roles.get(name) if rule.style == "colwise" else None
        heads = role.heads if role is not None and role.dim == dim else 0
        return find_uneven(entry, dim, axes, self.mesh, pieces=STYLES[rule.style].pieces, heads=heads)


def _with(spec: PartitionSpec, dim: int, axes: Axes) -> PartitionSpec:
    """A spec with a split of one more dim."""
    parts = [*spec, *(None for _ in range(dim + 1 - len(spec)))]
    parts[dim] = axes
    return PartitionSpec(*parts)
