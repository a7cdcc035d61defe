"""Plans by logical names of dims, as flax and MaxText write them."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.validate import check_kind
from torch_shard._common.wrappers import check_module
from torch_shard._plans.decisions import (
    Axes,
    Decision,
    completed,
    entries_of,
    find_uneven,
    listed,
    names_of,
    plan_of,
)
from torch_shard._plans.layers import LORA
from torch_shard._plans.logical_names import logical_names
from torch_shard._plans.logical_rules import Dim, LogicalRules, are_names, read_rules
from torch_shard._plans.roles import Role, roles_of
from torch_shard._sharding import ShardingPlan, check_mesh, make_matcher

logger = logging.getLogger(__name__)


@error_prefix("plans.from_logical")
def from_logical(
    model: nn.Module,
    mesh: Mesh,
    rules: Sequence[tuple[str, Axes | None]],
    *,
    names: Mapping[str, Sequence[Dim]] | None = None,
    activations: Mapping[str, Sequence[Dim]] | None = None,
    strict: bool = False,
) -> ShardingPlan:
    """Make a plan by logical names of dims: rules of flax's `logical_axis_rules`, such as those of MaxText.

    Of each tensor the rules count in their order: one gives a dim its axes if no rule before it gave it some, and none
    of these axes splits another dim of the tensor; so a name that comes again says what to fall back to. Axes that the
    mesh lacks, or has with size 1, take part in this and are then left out. A dim without a rule stays whole.

    The layers of torch and transformers have names as in MaxText: `embed`, `mlp`, `q_heads` and `kv`, `kv_heads` and
    `kv_head_dim`, `heads`, `vocab`, `embed_vocab`, `norm`, `exp`, `embed_moe`, `mlp_moe`, `q_lora`, `kv_lora`, ...
    Where rules do not know `embed_vocab`, `embed_moe`, `mlp_moe`, `q_heads` or `kv_heads`, the dim is called `embed`,
    `mlp` or `heads`. Layers are entries of their own: what rules say of a dim `layers` is nothing here.

    Args:
        model: Any module, on the meta device too: names, classes and shapes alone are read.
        mesh: Where it will lie.
        rules: Pairs of a logical name and an axis of the mesh, several or None, the first first.
        names: Logical names of the dims of entries, by name or glob, where others are meant than the layer's own: one
            for each dim, None for none, several for a dim that is several in MaxText (`("q_heads", "kv")`).
        activations: The same for what modules take and return, by the places of `ShardingPlan(activations=...)`.
        strict: Whether it is an error that a dim does not divide, that heads would be cut, or that the dims of a matrix
            have no names. Else such a dim stays whole, and is listed in a warning of the logger.

    Raises:
        TypeError: Rules are no pairs of a name and axes.
        ValueError: Names match no entry, are not as many as the dims, or one is there twice; or what `strict` refuses.

    Example:
        >>> import torch, torch_shard as ts
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> rules = [("mlp", "model"), ("embed", ["model", "batch"]), ("embed", ["batch"])]
        >>> plan = ts.plans.from_logical(mlp, ts.make_mesh(batch=4, model=2), rules)
        >>> plan.rules["0.weight"], plan.rules["2.weight"], plan.rules["2.bias"]
        (P('model', 'batch'), P('batch', 'model'), P())
    """
    model = check_module("model", model)
    check_mesh(mesh)
    read = read_rules(rules, mesh.shape)
    _check_names("names", names)
    _check_names("activations", activations)
    entries = entries_of(model)
    dims, faults = _names(model, names or {}, read)
    specs = {name: _spec(f'"{name}"', dims[name], read, faults) for name in dims}
    asked = {key: _spec(f'activations "{key}"', given, read, faults) for key, given in (activations or {}).items()}
    if faults:
        raise ValueError(listed("names cannot be read.", faults))
    if read.names and not any(any(spec) for spec in specs.values()):
        called = [dim for of_one in dims.values() for dim in of_one if isinstance(dim, str | tuple)]
        known = ", ".join(sorted({name for dim in called for name in names_of(dim)}))
        logger.warning("%s: no rule splits a parameter of this model. Its dims are called: %s.", caller(), known)
    roles, split = roles_of(model), dict[str, Decision]()
    for name, entry in entries.items():
        if name in specs:
            split[name] = _decide(dims[name], specs[name], entry, mesh=mesh, role=roles.get(name))
        elif isinstance(entry, nn.Parameter) and LORA not in name:
            split[name] = _unnamed(entry)
    return plan_of(model, completed(model, split, mesh), strict=strict, activations=asked)


def _check_names(argument: str, given: object) -> None:
    """Refuse what is no mapping to names of dims."""
    check_kind(argument, given, Mapping | None)
    items = cast(Mapping[object, object], given or {}).items()
    odd = {key: dims for key, dims in items if not (isinstance(key, str) and _are_dims(dims))}
    if odd:
        shown = "\n".join(f"  {key!r}: {dims!r}" for key, dims in odd.items())
        raise TypeError(
            f"{caller()}: names of dims are names, tuples of them or None, one for each dim. These are not:\n\n{shown}"
        )


def _are_dims(dims: object) -> bool:
    each = cast(Sequence[object], dims) if isinstance(dims, list | tuple) else (0,)
    return all(dim is PartitionSpec.UNCONSTRAINED or are_names(dim) for dim in each)


def _names(
    model: nn.Module, given: Mapping[str, Sequence[Dim]], rules: LogicalRules
) -> tuple[dict[str, tuple[Dim, ...]], list[str]]:
    """The names of dims of each entry that has some, and what is wrong with those of the user."""
    entries, faults = entries_of(model), list[str]()
    found = logical_names(model, rules.names)
    chosen: dict[str, str] = {}
    for key, dims in given.items():
        matches = make_matcher(key)
        matched = [name for name in entries if matches(name)]
        faults += [] if matched else [f'"{key}" matches no entry.']
        for name in matched:
            first = chosen.setdefault(name, key)
            if first != key and name not in (first, key) and tuple(given[first]) != tuple(dims):
                faults.append(f'{name}: "{first}" and "{key}" give it different names. Add "{name}" itself.')
            if entries[name].ndim != len(dims):
                faults.append(f'{name} {tuple(entries[name].shape)}: "{key}" has {len(dims)} names.')
            elif first == key or name == key:
                found[name] = tuple(tuple(dim) if isinstance(dim, list) else dim for dim in dims)
    return found, faults


def _spec(where: str, dims: Sequence[Dim], rules: LogicalRules, faults: list[str]) -> PartitionSpec:
    try:
        return rules.spec_of(dims)
    except ValueError as error:
        faults.append(f"{where}: {error}. Give each dim its own.")
        return PartitionSpec()


def _decide(
    dims: Sequence[Dim], spec: PartitionSpec, entry: torch.Tensor, *, mesh: Mesh, role: Role | None
) -> Decision:
    """The spec of an entry, without what does not fit its shape."""
    parts, faults = list[Axes | None](), list[str]()
    for number, (dim, part) in enumerate(zip(dims, spec, strict=True)):
        heads = role.heads if role is not None and isinstance(dim, tuple) and number == role.dim else 0
        fault = find_uneven(entry, number, part, mesh, heads=heads)
        faults += [fault] if fault else []
        parts.append(None if fault else part)
    shown = ", ".join(" x ".join(dim) if isinstance(dim, tuple) else dim or "-" for dim in dims)
    return Decision(PartitionSpec(*parts) if any(parts) else PartitionSpec(), f"({shown})", "; ".join(faults))


def _unnamed(entry: torch.Tensor) -> Decision:
    fault = "its dims have no names; give them by names=" if entry.ndim > 1 else ""
    return Decision(PartitionSpec(), "a vector without a name" if entry.ndim < 2 else "of no known layer", fault)
