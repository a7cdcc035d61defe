"""Plans by logical names of dims, as flax and MaxText write them: the names of torch's layers, and rules of axes."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.validate import check_kind, check_module
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
from torch_shard._plans.roles import (
    LORA,
    ROUTERS,
    Role,
    base_of,
    experts_of,
    is_norm,
    is_table,
    layers_of,
    product_of,
    roles_of,
)
from torch_shard._sharding import ShardingPlan, check_mesh, make_matcher

Dim: TypeAlias = Any  # str | tuple[str, ...] | None, or PartitionSpec.UNCONSTRAINED, which has no type of its own
"""Of one dim: its logical name, None for none, several where one dim stands for several (heads and their features)."""


@dataclass(frozen=True)
class LogicalRules:
    """Rules in the order of their priority.

    Attributes:
        pairs: A logical name, and the axes for it; the same name may come again, with what to fall back to.
        sizes: Of the axes of a mesh. Those that it lacks, or has with size 1, take part in the choice and are then left
            out, as MaxText does it (`remove_size_one_mesh_axis`).
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: Mapping[str, int]

    @property
    def names(self) -> set[str]:
        """All logical names."""
        return {name for name, _ in self.pairs}

    def spec_of(self, dims: Sequence[Dim]) -> PartitionSpec:
        """The spec of a tensor with these dims: flax's `logical_to_mesh_axes`.

        A rule counts if its name is one of the tensor's, which no rule before it has given axes, and none of its axes
        splits another dim of the tensor.
        """
        split = [() if dim is PartitionSpec.UNCONSTRAINED else names_of(dim) for dim in dims]
        names = [name for part in split for name in part]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is the name of two dims")
        given: dict[str, tuple[str, ...]] = {}
        for name, axes in self.pairs:
            taken = {axis for others in given.values() for axis in others}
            if name in names and name not in given and taken.isdisjoint(axes):
                given[name] = axes
        found = ([axis for name in part for axis in given.get(name, ())] for part in split)
        parts = (tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1) for axes in found)
        pairs = zip(dims, parts, strict=True)
        return PartitionSpec(*(dim if dim is PartitionSpec.UNCONSTRAINED else part for dim, part in pairs))


def read_rules(rules: object, sizes: Mapping[str, int]) -> LogicalRules:
    """Read what a user gave as rules."""
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise TypeError(
            f"{caller()}: rules must be a sequence of pairs, as in "
            f'[("embed", ["fsdp"]), ("mlp", "tensor")], got {type(rules).__name__}.'
        )
    given = cast(Sequence[object], rules)
    if odd := [rule for rule in given if not _is_rule(rule)]:
        shown = "\n".join(f"  {rule!r}" for rule in odd)
        raise TypeError(
            f"{caller()}: a rule is a logical name with an axis, several or None. These are not:\n\n{shown}"
        )
    pairs = cast(Iterable[tuple[str, Axes | None]], given)
    return LogicalRules(tuple((name, names_of(axes)) for name, axes in pairs), sizes)


def _is_rule(rule: object) -> bool:
    parts = cast(Sequence[object], rule) if isinstance(rule, list | tuple) else ()
    return len(parts) == 2 and isinstance(parts[0], str) and are_names(parts[1])


def are_names(value: object) -> bool:
    """Whether it is None, a name or several."""
    parts = cast(Sequence[object], value) if isinstance(value, list | tuple) else [value]
    return value is None or all(isinstance(part, str) for part in parts)


Dims = tuple[Dim, ...]

OLDER = {"embed_vocab": "embed", "embed_moe": "embed", "mlp_moe": "mlp", "q_heads": "heads", "kv_heads": "heads"}
"""What a dim was called before it had a name of its own: counts where rules do not know that."""

_LAST = {
    "q_a_proj": ("q_lora_up_proj", "embed"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "kv_a_proj"), ("kv_lora_up_proj", "embed")),
    "q_b_proj": (("q_heads", "kv"), "q_lora"),
    "kv_b_proj": (("kv_heads", "kv_head_dim"), "kv_lora"),
    **dict.fromkeys(("q", "q_proj", "wq", "query", "q_lin", "to_q"), (("q_heads", "kv"), "embed")),
    **dict.fromkeys(("k", "k_proj", "wk", "key", "k_lin", "to_k"), (("kv_heads", "kv_head_dim"), "embed")),
    **dict.fromkeys(("v", "v_proj", "wv", "value", "v_lin", "to_v"), (("kv_heads", "kv_head_dim"), "embed")),
    **dict.fromkeys(("qkv", "qkv_proj", "c_attn", "query_key_value"), (("qkv", "heads", "kv"), "embed")),
}
"""Of projections by name: their features, and what they sum over."""

_ROUTER: tuple[Dim, Dim] = (None, "embed_moe")
"""Of what chooses experts: a score for each, and what it sums over."""

_HEADS = ("lm_head", "embed_out", "output_projection")
"""Of layers that give a score to each token; others are known by having as many features as there are tokens."""


def logical_names(model: nn.Module, roles: Mapping[str, Role], known: Collection[str]) -> dict[str, Dims]:
    """The names of the dims of each parameter whose layer is known, by name."""
    found = dict[str, Dims]()
    for path, layer in layers_of(model):
        for own, p in layer.named_parameters(recurse=False) if LORA not in path else ():
            name = f"{path}.{own}" if path else own
            if (dims := _dims_of(path, layer, p, roles[name], is_expert=own in experts_of(layer))) is not None:
                found[name] = tuple(_as_known(dim, known) for dim in dims)
    return found


def _dims_of(path: str, layer: nn.Module, p: torch.Tensor, role: Role, *, is_expert: bool) -> Dims | None:
    """The names of the dims of a parameter; biases are named as what they are added to."""
    product = product_of(layer)
    if is_expert and p.ndim == 3:  # (experts, features, features)
        return ("exp", "mlp_moe", "embed_moe") if role.dim == 1 else ("exp", "embed_moe", "mlp_moe")
    if is_expert:
        return ("exp", "activation_embed" if role.dim is None else "activation_mlp") if p.ndim == 2 else None
    if is_table(layer):
        return ("vocab", "embed_vocab") if role.dim == 0 else (None, "embed")
    if is_norm(layer):
        return ("norm",) if p.ndim == 1 else None
    if product is not None and not product.is_kernel:
        out, summed = _of_product(path, role)
        if p.ndim == 2:
            return (out, summed) if product.out_dim == 0 else (summed, out)
        return (out,) if p.shape == (product.num_out,) else None
    if path.rpartition(".")[2] in ROUTERS or "Router" in type(layer).__name__:
        return _ROUTER if p.ndim == 2 else (None,) * p.ndim
    return None


def _of_product(path: str, role: Role) -> tuple[Dim, Dim]:
    """The features of a product, and what it sums over."""
    parent, _, last = base_of(path).rpartition(".")
    if last in _LAST:
        out, summed = _LAST[last]
        return out, summed
    if last in ROUTERS:
        return _ROUTER
    if last in _HEADS or (role.is_vocabulary and role.side == "column"):
        return "vocab", "embed_vocab"
    is_attention = role.heads > 0 or "att" in parent.rpartition(".")[2].lower()
    inner: Dim = ("heads", "kv") if is_attention else "mlp"
    return {"column": (inner, "embed"), "row": ("embed", inner), "whole": (None, "embed")}[role.side]


def _as_known(dim: Dim, known: Collection[str]) -> Dim:
    if isinstance(dim, tuple):
        return tuple(str(_as_known(name, known)) for name in dim)
    return OLDER[dim] if dim in OLDER and dim not in known else dim


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
    entries, roles = entries_of(model), roles_of(model)
    dims = logical_names(model, roles, read.names)
    faults = _put_given(dims, names or {}, entries)
    specs = {name: _spec(f'"{name}"', dims[name], read, faults) for name in dims}
    asked = {key: _spec(f'activations "{key}"', given, read, faults) for key, given in (activations or {}).items()}
    if faults:
        raise ValueError(listed("names cannot be read.", faults))
    if read.names and not any(any(spec) for spec in specs.values()):
        called = [dim for of_one in dims.values() for dim in of_one if isinstance(dim, str | tuple)]
        known = ", ".join(sorted({name for dim in called for name in names_of(dim)}))
        logger.warning("%s: no rule splits a parameter of this model. Its dims are called: %s.", caller(), known)
    split = dict[str, Decision]()
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


def _put_given(
    found: dict[str, Dims], given: Mapping[str, Sequence[Dim]], entries: Mapping[str, torch.Tensor]
) -> list[str]:
    """Put the user's names of dims in place of those that were found; what is wrong with them."""
    faults, chosen = list[str](), dict[str, str]()
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
    return faults


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
