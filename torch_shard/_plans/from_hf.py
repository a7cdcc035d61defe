"""The plan that a transformers model has for itself: its `tp_plan`, `ep_plan` and `fsdp_plan`.

Read from transformers 5.23: `distributed/tensor_parallel.py`, `expert_parallel.py` and `fsdp.py`.
"""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import error_prefix
from torch_shard._common.validate import check_kind, check_module
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
from torch_shard._plans.roles import LORA, Role, roles_of
from torch_shard._sharding import Pieces, ShardingPlan, check_mesh

_WRAPPERS = re.compile(
    r"(?<![^.])(?:base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module)\."
)
"""What peft, torch.compile and checkpointing put between a module's name and its parameters'."""


@dataclass(frozen=True)
class Rule:
    """What a plan of transformers says of a name.

    Attributes:
        style: By name.
        key: The plan's.
    """

    style: str
    key: str


class Rules:
    """One plan of a model, or of the models in a wrapper: those of the outermost modules that have some.

    Args:
        model: A `PreTrainedModel`, or a module that holds some.
        kind: `"tp_plan"`, `"ep_plan"` or `"fsdp_plan"`.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.plans: dict[str, Mapping[str, str]] = {}
        for name, module in model.named_modules():
            # The plan of an outer model has the rules of those in it already.
            if any(is_within(name, owner) for owner in self.plans):
                continue
            plan = _plan_of(module, kind)
            if plan:
                self.plans[name] = plan

    def of_module(self, name: str) -> Rule | None:
        """The rule of a module."""
        return next(self._of(name, slice(1)), None)

    def of_parameter(self, name: str) -> Rule | None:
        """The rule of a parameter or else of its module, as transformers looks it up."""
        return next(self._of(name, slice(2)), None)

    def above(self, name: str) -> Rule | None:
        """The rule of the closest module that holds a parameter."""
        return next(self._of(name, slice(1, None)), None)

    def holds(self, key: str) -> bool:
        """Tell whether a key of another plan is one of this plan's, or below one."""
        return any(is_within(key, owner) for plan in self.plans.values() for owner in plan)

    def _of(self, name: str, which: slice) -> Iterator[Rule]:
        """The rules of what a name says, and of the modules around it, in the words of the plan that speaks of it.

        As transformers looks for it (`replace_layer_number_by_wildcard`), `*` stands for the numbers of layers; of two
        numbers next to each other, its expression replaces the first alone.
        """
        owner = next((owner for owner in self.plans if is_within(name, owner)), None)
        if owner is None:
            return
        plan = self.plans[owner]
        within = name[len(owner) :].removeprefix(".")
        within = _WRAPPERS.sub("", f"{within}.").removesuffix(".")
        parts = re.sub(r"\.\d+(\.|$)", r".*\1", within).split(".")

        # From the name itself outwards.
        keys = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        for key in keys[which]:
            if key in plan:
                yield Rule(plan[key], key)


def is_within(name: str, module: str) -> bool:
    """Tell whether a name is that of a module, or of something in it; the model itself has none."""
    return not module or name == module or name.startswith(f"{module}.")


def _plan_of(module: nn.Module, kind: str) -> Mapping[str, str]:
    """Its own: a wrapper that passes attributes on to what it holds has none."""
    if not (hasattr(type(module), kind) or kind in vars(module)):
        return {}
    plan = cast(object, getattr(module, kind))
    return cast(Mapping[str, str], plan) if isinstance(plan, Mapping) else {}


@dataclass(frozen=True)
class Style:
    """One of `transformers.distributed.parallel_utils.ALL_PARALLEL_STYLES`.

    Attributes:
        dim: That it splits, from the end if it is negative; None where it splits none.
        pieces: Of that dim, each of which is split by itself: 2 where gate and up are one parameter.
        skips: The parameters that it leaves whole: "bias", those of that name; "vectors", those of one dim.
        note: What is made of its work on activations and gradients.
    """

    dim: int | None = None
    pieces: int = 1
    skips: str = ""
    note: str = ""

    def dim_of(self, parameter: str, num_dims: int) -> int | None:
        """The dim of a parameter that it splits, from 0."""
        is_bias = self.skips == "bias" and parameter == "bias"
        is_vector = self.skips == "vectors" and num_dims == 1
        if self.dim is None or is_bias or is_vector:
            return None
        dim = max(num_dims + self.dim, 0) if self.dim < 0 else self.dim  # of a vector, its only one
        return dim if dim < num_dims else None


STYLES = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep"), Style(-2)),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep"), Style(-1, skips="bias")),
    "packed_colwise": Style(-2, pieces=2),
    "packed_rowwise": Style(-1, pieces=2, skips="vectors"),
    "embedding_rowwise": Style(0),
    "embedding_colwise": Style(1),
    "grouped_gemm": Style(0),
    **dict.fromkeys(
        ("moe_tp_experts", "ep_dispatch_experts", "local_params"), Style(note="its parameters have rules of their own")
    ),
    "replicate": Style(note="whole"),
    "sequence_parallel": Style(note="what it takes and returns is split along the sequence"),
    **dict.fromkeys(
        ("replicated_with_grad_allreduce", "mla_kv_a_proj"),
        Style(note="nothing to do: no gradient is one device's part"),
    ),
    **dict.fromkeys(("all_reduce", "moe_identity_expert"), Style(note="nothing to do: no output is one device's part")),
}
"""By name; `colwise_rep` and `rowwise_rep` are older names."""

FSDP_STYLES = {
    "free_full_weight": "free_full_weight",
    "keep_full_weight": "keep_full_weight, stored alike: XLA decides for how long it is gathered",
}
"""What is said of an entry that is split for storage alone."""


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

    rules = {name: Rules(model, f"{name}_plan") for name in ("tp", "ep", "fsdp")}
    faults = list[str]()
    for name, axes in {"tp": tp, "ep": ep, "fsdp": fsdp}.items():
        if axes is not None:
            faults += _find_faults(name, rules)
    if faults:
        raise ValueError(listed(f"{type(model).__name__} has no plan that can be read.", faults))

    reader = _Reader(mesh, tp, ep, rules["tp"], rules["ep"], roles_of(model))
    split, notes = dict[str, Decision](), dict[str, str]()
    for name, p in model.named_parameters(remove_duplicate=False):
        if LORA in name:
            continue
        split[name] = reader.split(name, p)
        rule = rules["fsdp"].above(name) if fsdp else None
        if rule is not None:
            notes[name] = FSDP_STYLES[rule.style]

    decisions = completed(model, split, mesh, fsdp=fsdp, notes=notes)
    activations = {} if tp is None else _over_time(model, rules["tp"], tp)
    return plan_of(model, decisions, strict=strict, activations=activations)


def _find_faults(argument: str, rules: Mapping[str, Rules]) -> list[str]:
    """What cannot be read of a plan."""
    styles = FSDP_STYLES if argument == "fsdp" else STYLES
    faults = list[str]()
    for plan in rules[argument].plans.values():
        for key, style in plan.items():
            if style not in styles:
                faults.append(
                    f'{argument}_plan["{key}"] is "{style}", which is none of its styles: {", ".join(styles)}. '
                    f"Change it in model.{argument}_plan, or pass {argument}=None."
                )

    # A model with a tp_plan alone is stored in pieces by its shapes.
    if not rules[argument].plans and (argument != "fsdp" or not rules["tp"].plans):
        recipe = "expert" if argument == "ep" else argument
        faults.append(
            f"it has no {argument}_plan. Use ts.plans.{recipe}(model, mesh), which goes by what layers are, "
            f"or pass {argument}=None."
        )
    return faults


# With Megatron's constraints on what all layers take and return, a Llama compiles for TPU (v5e:4x4, two layers) to the
# same collectives, 110 of 45.9 MiB; with the logits gathered, as `colwise_gather_output` asks, to 58.9 MiB.
def _over_time(model: nn.Module, rules: Rules, tp: Axes) -> dict[str, PartitionSpec]:
    """What modules of the style `sequence_parallel` take and return, by place."""
    constraints: dict[str, PartitionSpec] = {}
    for name, module in model.named_modules():
        rule = rules.of_module(name)
        if rule is None or rule.style != "sequence_parallel":
            continue
        first_argument = next(iter(inspect.signature(module.forward).parameters))
        for place in (name, f"{name}:{first_argument}"):
            constraints[place] = PartitionSpec(PartitionSpec.UNCONSTRAINED, tp)
    return places_with_globs(constraints, model)


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
        spec = PartitionSpec()
        form: Pieces | None = None
        reasons, faults = list[str](), list[str]()
        for axes, rule in ((self.ep, self.ep_rules.of_parameter(name)), (self.tp, self._tp_rule(name))):
            if axes is None or rule is None:
                continue
            style = STYLES[rule.style]
            note = style.note
            dim = style.dim_of(name.rpartition(".")[2], entry.ndim)
            if dim is not None:
                fault = self._fault(name, entry, dim, axes=axes, rule=rule)
                if fault:
                    faults.append(fault)
                    note = ""
                if dim < len(spec) and spec[dim] is not None:
                    note = "the dim is split already"
                elif not fault:
                    spec = _with(spec, dim, axes)
                    form = Pieces(style.pieces, dim=dim) if style.pieces > 1 else form
            reasons.append(f"{rule.style} ({note})" if note else rule.style)
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
