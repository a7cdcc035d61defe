"""Plans of how entries are split: rules from names to specs, checked against shapes before anything moves."""

# What a module holds, PyTorch keeps in attributes with an underscore, and annotates in part.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table
from rich.text import Text
from torch.nn.parameter import is_lazy

from torch_shard._common.caller import public
from torch_shard._common.printed import InNotebooks
from torch_shard._common.specs import axes_of, describe_mesh, describe_spec
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_kind, unwrapped
from torch_shard._entries import group_ties, named_tensors
from torch_shard._sharding.activations import Constraint, find_type_fault, make_matcher, resolve_activations
from torch_shard._sharding.context import Context
from torch_shard._sharding.forms import Form, Padded, Pieces, kernel_forms
from torch_shard._sharding.mesh import check_mesh, find_spec_faults
from torch_shard._sharding.pipeline import Pipeline
from torch_shard._sharding.resolved import ResolvedEntry, ResolvedPlan, print_wide

Rules: TypeAlias = Mapping[str, PartitionSpec] | Mapping[str | re.Pattern[str], PartitionSpec]

Forms: TypeAlias = Mapping[str, Form] | Mapping[str | re.Pattern[str], Form]

_Rule: TypeAlias = str | re.Pattern[str]

_Key: TypeAlias = _Rule | None  # of a rule; None is the default's

_TABLES = ("rules", "activations", "reasons", "ranks", "stored")


@dataclass(frozen=True, repr=False)
class ShardingPlan(InNotebooks):
    """Rules that give every entry of a model, by its `state_dict` name, a `PartitionSpec`.

    A rule is an exact name, a glob over dotted segments (`*` is any text within one segment, `**` any
    number of whole segments, also none), or a compiled regex that must match the whole name. Order
    never matters: an exact name beats a pattern, and two patterns that give one name different specs
    are an error. A plan is immutable; it meets a model and a mesh only in `resolve`.

    Args:
        rules: Specs by exact name, glob or compiled regex.
        default: Spec of the names that no rule matches. Without it such a name is an error:
            replication is never silent, it is asked for with `default=P()`.
        reasons: Why a rule is as it is, by rule; shown in tables.
        ranks: Which rules count before others, by kind and rule, as `plan | other` makes them.
        activations: Specs of what modules take and return, which a step keeps so, and its gradient too; it never
            changes a number. By name or glob of modules, `"model.layers.*"`: what it returns; `"lm_head:input"`: an
            argument of its forward; `"encoder:return.last_hidden_state"`, `"block:states.0"`: a part of either, by
            the names of attributes, keys or numbers. The others are the compiler's choice.
        stored: Entries of which a step keeps another form than torch's, by rule: `Pieces(3, dim=0)` for a fused
            projection, of which every device then has its part of each piece; `Padded(50304, dim=0)` for a vocabulary
            that does not divide. On TPUs a step keeps kernels of convolutions with their channels last, unasked. Specs,
            files and what `state.params[name]` gives are for torch's shape; only the arrays within a state have the
            other one.
        context: Over which axis a step splits the sequence of the batch, and how attention finds all keys; None for
            none.
        pipeline: Over which axis the repeated layers are split into stages; None for none.
        rows: The axes over which a step splits the rows of the batch, if it is given no `batch_spec`; None for `batch`.

    Raises:
        TypeError: A rule is neither a string nor a compiled regex, or its spec is not a `PartitionSpec`.
        ValueError: A glob has `**` as part of a segment.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> import torch_shard as ts
        >>> plan = ts.ShardingPlan({"**.weight": P("model", None)}, default=P())
        >>> resolved = plan.resolve({"up.weight": (8, 16), "up.bias": (8,)}, ts.make_mesh(batch=4, model=2))
        >>> resolved.entries["up.weight"].local_shape
        (4, 16)
    """

    rules: Rules
    default: PartitionSpec | None = field(default=None, kw_only=True)
    activations: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec], kw_only=True)
    reasons: Mapping[_Rule, str] = field(default_factory=dict[_Rule, str], kw_only=True)
    ranks: Mapping[tuple[str, _Rule], int] = field(default_factory=dict[tuple[str, _Rule], int], kw_only=True)
    stored: Forms = field(default_factory=dict[str, Form], kw_only=True)
    context: Context | None = field(default=None, kw_only=True)
    pipeline: Pipeline | None = field(default=None, kw_only=True)
    rows: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self):
        for what in _TABLES:
            _check_mapping(what, getattr(self, what))
            object.__setattr__(self, what, MappingProxyType(dict(getattr(self, what))))
        check_kind("context", self.context, Context | None)
        check_kind("pipeline", self.pipeline, Pipeline | None)
        check_kind("rows", self.rows, tuple | None)

        faults: list[str | None] = [_find_type_fault(_quote(key), key, spec) for key, spec in self.rules.items()]
        if self.default is not None:
            faults.append(_find_type_fault("default", "", self.default))
        faults += [find_type_fault(key, spec) for key, spec in self.activations.items()]
        faults += [_find_form_type_fault(key, form) for key, form in self._forms.items()]
        lines = [fault for fault in faults if fault]
        if lines:
            raise TypeError(_list(f"{_count(lines, 'rule')} cannot be read", lines))

        lines = list[str]()
        for key in (*self._specs, *self.stored):
            if isinstance(key, str) and re.search(r"[^.]\*\*|\*\*[^.]", key):
                lines.append(f'rule "{key}": ** stands for whole segments. Use * within one.')
        if lines:
            raise ValueError(_list(f"{_count(lines, 'rule')} cannot be read", lines))

    @property
    def _specs(self) -> Mapping[_Rule, PartitionSpec]:
        # Mappings are invariant in their keys, which may all be strings.
        return cast(Mapping[_Rule, PartitionSpec], self.rules)

    @property
    def _forms(self) -> Mapping[_Rule, Form]:
        return cast(Mapping[_Rule, Form], self.stored)

    def __or__(self, other: ShardingPlan | Rules) -> ShardingPlan:
        """This plan, edited: where a rule of `other` matches, those of this plan do not count.

        Args:
            other: A plan, or rules as `ShardingPlan` takes them. Its `default` counts if it has one.
        """
        if not isinstance(cast(object, other), ShardingPlan | Mapping):
            return NotImplemented
        edits = other if isinstance(other, ShardingPlan) else ShardingPlan(other)

        # Every rule of the edits counts before every rule of this plan, in the order that the edits have among them.
        ranks = dict(self.ranks)
        first_rank = 1 + max(self.ranks.values(), default=0)
        for kind in ("rules", "activations", "stored"):
            for key in getattr(edits, kind):
                ranks[kind, key] = first_rank + edits.ranks.get((kind, key), 0)

        reasons = {key: reason for key, reason in self.reasons.items() if key not in edits.rules}
        return ShardingPlan(
            {**self._specs, **edits._specs},
            default=self.default if edits.default is None else edits.default,
            activations={**self.activations, **edits.activations},
            reasons=reasons | dict(edits.reasons),
            stored={**self._forms, **edits._forms},
            context=edits.context or self.context,
            pipeline=edits.pipeline or self.pipeline,
            rows=edits.rows or self.rows,
            ranks=ranks,
        )

    def __hash__(self):
        tables = [frozenset(table.items()) for table in (self.rules, self.activations, self._forms)]
        return hash((self.default, self.context, self.pipeline, self.rows, *tables))

    def __reduce__(self):
        # A mappingproxy can be neither copied nor pickled.
        tables = {what: dict(getattr(self, what)) for what in _TABLES}
        return partial(ShardingPlan, **vars(self) | tables), ()

    def __repr__(self):
        def shown(rules: Mapping[Any, PartitionSpec]) -> str:
            return "{" + ", ".join(f"{key!r}: {describe_spec(spec)}" for key, spec in rules.items()) + "}"

        arguments = [shown(self.rules)]
        if self.default is not None:
            arguments.append(f"default={describe_spec(self.default)}")
        if self.activations:
            arguments.append(f"activations={shown(self.activations)}")
        if self.stored:
            forms = ", ".join(f"{key!r}: {form}" for key, form in self._forms.items())
            arguments.append(f"stored={{{forms}}}")
        for name in ("context", "pipeline", "rows"):
            value = getattr(self, name)
            if value is not None:
                arguments.append(f"{name}={value}")
        return f"ShardingPlan({', '.join(arguments)})"

    def __rich__(self) -> Table:
        table = Table(title="ShardingPlan")
        for heading in ("rule", "spec", "why"):
            table.add_column(heading, overflow="fold")

        def add_row(*cells: str) -> None:
            # As `Text`: rich would read the brackets of a name as markup.
            table.add_row(*map(Text, cells))

        for key, spec in self._specs.items():
            add_row(_quote(key), describe_spec(spec), self.reasons.get(key, ""))
        if self.default is not None:
            add_row(_quote(None), describe_spec(self.default), "")
        for key, spec in self.activations.items():
            add_row(_quote(key), describe_spec(spec), "an activation")
        for key, form in self._forms.items():
            add_row(_quote(key), str(form), "how it is stored")

        notes: list[str] = []
        if self.context:
            notes.append(f"the sequence is split over {self.context.axis} (context_mode={self.context.mode!r})")
        if self.pipeline:
            notes.append(f"the layers are split over {self.pipeline.axis} ({self.pipeline})")
        table.caption = "; ".join(notes) or None
        return table

    def __str__(self) -> str:
        return print_wide(self) if self.reasons else repr(self)

    @public
    def resolve(self, source: torch.nn.Module | Mapping[str, PyTree], mesh: Mesh) -> ResolvedPlan:
        """Give every entry its sharding on `mesh`, or say of all that cannot have one why not.

        Reads names and shapes only, so meta tensors work; nothing is placed or traced. The names of
        a tie (one tensor under several names) share one sharding: a rule for any of them counts for all.

        Args:
            source: A module (its parameters, then its buffers, non-persistent ones included), or a mapping
                from names to tensors, arrays, `jax.ShapeDtypeStruct`s or shape tuples. Shapes are global.
            mesh: A mesh of Auto axes.

        Returns:
            The shardings by name, in the source's order. Printed, it is a table with bytes per device.

        Raises:
            TypeError: `mesh` is not a Mesh, or an entry of `source` lacks a name or a shape.
            ValueError: The mesh is not Auto; or, all in one error, rules that disagree, match nothing or
                miss a name, and specs that do not fit their shape and the mesh.
        """
        check_mesh(mesh)
        source = unwrapped(source) if isinstance(source, torch.nn.Module) else source
        model = source if isinstance(source, torch.nn.Module) else None
        values = _read(source)
        spec_hits = _hits(self._specs, values)
        form_hits = _hits(self._forms, values)
        kernels = kernel_forms(model, mesh.devices.flat[0].platform)

        entries: dict[str, ResolvedEntry] = {}
        faults: dict[str, list[str]] = {}
        for names in group_ties(values, by_identity=model is not None):
            value = values[names[0]]
            shape = tuple(getattr(value, "shape", value))
            name, key, spec, clash = self._choose(names, spec_hits)
            form, form_fault = self._choose_form(names, form_hits)
            if form is None and len(names) == 1:
                form = kernels.get(name)
            if form is not None and not form_fault:
                form_fault = form.find_fault(shape)

            entry_faults = [fault for fault in (clash, form_fault) if fault]
            if not clash:
                # What is padded is split as it is stored, and what is in pieces as torch has it.
                split_shape = shape
                if isinstance(form, Padded) and not form_fault:
                    split_shape = form.stored_shape(shape)
                entry_faults += _find_faults(name, key, spec, shape=split_shape, mesh=mesh)
            if form is not None and not entry_faults:
                stored_spec = form.stored_spec(spec, ndim=len(shape))
                for fault, remedy in find_spec_faults(stored_spec, form.stored_shape(shape), mesh):
                    entry_faults.append(f"{form}: {fault}. {remedy}")
            if entry_faults:
                faults[f"{name} {shape}"] = entry_faults
                continue

            dtype = getattr(values[name], "dtype", None)
            reason = "" if key is None else self.reasons.get(key, "")
            entry = ResolvedEntry(shape, dtype, _quote(key), NamedSharding(mesh, spec), reason=reason, form=form)
            entries[names[0]] = entry
            for alias in names[1:]:
                entries[alias] = replace(entry, tied_to=names[0])

        # A mapping has no modules that could return an activation.
        constraints: list[Constraint] = []
        activation_faults: list[str] = []
        if model is not None:
            constraints, activation_faults = self._constraints(model, mesh, entries)

        for what, part in (("sequence", self.context), ("model", self.pipeline)):
            lines = part.find_faults(mesh) if part else []
            if lines:
                raise ValueError(_list(f"the {what} cannot be split as asked", lines))

        unused = _unused(self._specs, spec_hits) + _unused(self._forms, form_hits)
        if faults or unused or activation_faults:
            hints = _hint_at_names(unused, list(values))
            raise ValueError(_report(faults, hints, activation_faults, mesh=mesh))

        in_order = MappingProxyType({name: entries[name] for name in values})
        return ResolvedPlan(mesh, in_order, tuple(constraints), self.context, self.pipeline)

    def _constraints(
        self, model: torch.nn.Module, mesh: Mesh, entries: Mapping[str, ResolvedEntry]
    ) -> tuple[list[Constraint], list[str]]:
        ranks = {key: self.ranks.get(("activations", key), 0) for key in self.activations}
        resolved, faults = resolve_activations(self.activations, model, mesh, ranks)

        constraints: list[Constraint] = []
        for constraint in resolved:
            matrix = entries.get(constraint.place.matrix or "")
            if matrix is not None and len(matrix.shape) == 2:
                constraint = replace(constraint, of_matrix=tuple(axes_of(matrix.sharding.spec)))
            constraints.append(constraint)
        return constraints, faults

    def _counting(self, kind: str, names: list[str], hits: dict[str, list[_Rule]]) -> list[_Rule]:
        """Those of the highest rank of the rules that match any of these names."""
        ranks: dict[_Rule, int] = {}
        for name in names:
            for key in hits[name]:
                ranks[key] = self.ranks.get((kind, key), 0)
        highest = max(ranks.values(), default=0)
        return [key for key, rank in ranks.items() if rank == highest]

    def _choose_form(self, names: list[str], formed: dict[str, list[_Rule]]) -> tuple[Form | None, str | None]:
        """How one tensor of these `names` is stored, by the rules that match each; or why it cannot be."""
        keys = self._counting("stored", names, formed)
        keys = [key for key in keys if key in names] or keys
        forms = list(dict.fromkeys(self._forms[key] for key in keys))
        if len(names) > 1 and any(isinstance(form, Pieces) for form in forms):
            return None, f"{forms[0]}: it is tied to {names[1]}, and a tie is stored in torch's form. Leave it out."
        if len(forms) > 1:
            asked = " and ".join(f"{_quote(key)}: {self._forms[key]}" for key in keys)
            return None, f"{asked} store it in different forms. Narrow the patterns."
        return (forms[0] if forms else None), None

    def _choose(self, names: list[str], hits: dict[str, list[_Rule]]) -> tuple[str, _Key, PartitionSpec, str | None]:
        """Choose the rule of one tensor: which of its `names` matches, the rule's key and spec, any clash."""
        owners: dict[PartitionSpec, tuple[str, _Rule]] = {}
        counting = self._counting("rules", names, hits)
        for name in names:
            keys = [key for key in hits[name] if key in counting]
            # An exact name beats patterns.
            if name in keys:
                keys = [name]
            for key in keys:
                owners.setdefault(_trim(self._specs[key]), (name, key))

        if not owners:
            if self.default is not None:
                return names[0], None, self.default, None
            clash = f'no rule matches it. Add one, such as "{names[0]}": P(), or give the plan default=P().'
            return names[0], None, PartitionSpec(), clash

        (name, key), *others = owners.values()
        if not others:
            return name, key, self._specs[key], None

        rules = [f"rule {_quote(key)}: {describe_spec(self._specs[key])}" for _, key in owners.values()]
        clash = f"{' and '.join(rules)} give it different specs."
        tied = [other for other, _ in others if other != name]
        if tied:
            clash = f"it is tied to {tied[0]}, and {clash} Give both names one spec, or only one a rule."
        else:
            clash += f' Add a rule for "{name}" itself, or narrow the patterns.'
        return name, key, self._specs[key], clash


def _hits(rules: Mapping[_Rule, object], names: Iterable[str]) -> dict[str, list[_Rule]]:
    """The rules that match, by name."""
    matchers = {key: make_matcher(key) for key in rules}
    hits: dict[str, list[_Rule]] = {}
    for name in names:
        hits[name] = [key for key, matches in matchers.items() if matches(name)]
    return hits


def _unused(rules: Mapping[_Rule, object], hits: Mapping[str, list[_Rule]]) -> list[_Rule]:
    """The rules that match no name."""
    used = {key for keys in hits.values() for key in keys}
    return [key for key in rules if key not in used]


def _find_form_type_fault(key: object, form: object) -> str | None:
    if not isinstance(key, str | re.Pattern):
        return f"stored {key!r}: a rule is a name, a glob or a compiled regex, got {type(key).__name__}."
    if not isinstance(form, Form):
        return f"stored {_quote(cast(object, key))}: expected Pieces or Padded, got {form!r}."
    return None


def _check_mapping(what: str, rules: object) -> None:
    if not isinstance(rules, Mapping):
        remedy = " make_train_step(mesh=) takes the mesh." if isinstance(rules, Mesh) else ""
        raise TypeError(f"ShardingPlan: {what} must map names to specs, got {type(rules).__name__}.{remedy}")


def _read(source: object) -> dict[str, PyTree]:
    """Collect what `source` holds, by name, and refuse what has no shape."""
    if isinstance(source, torch.nn.Module):
        values: dict[str, PyTree] = {**named_tensors(source)}
    elif isinstance(source, Mapping):
        values = dict(cast(Mapping[str, PyTree], source))
    else:
        raise TypeError(f"ShardingPlan.resolve: expected a module or a mapping, got {type(source).__name__}.")

    lines: list[str] = []
    for name, value in values.items():
        fault = _find_shape_fault(name, value)
        if fault:
            lines.append(f"{name}: {fault}")
    if lines:
        raise TypeError(_list(f"{_count(lines, 'value')} cannot be read", lines))
    return values


def _find_shape_fault(name: object, value: PyTree) -> str | None:
    if not isinstance(name, str):
        return f"a name must be a string, got {type(name).__name__}."
    if is_lazy(value):
        return "a lazy parameter has no shape yet. Call the module once on example inputs."
    shape = getattr(value, "shape", value)
    sizes = cast(Sequence[object], shape) if isinstance(shape, tuple | list) else (None,)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        return f"{type(value).__name__} has no shape. Give a tensor, an array or a shape tuple."
    return None


def _find_type_fault(label: str, key: object, spec: object) -> str | None:
    # The pattern of a compiled regex may be of bytes.
    pattern: object = cast(re.Pattern[str], key).pattern if isinstance(key, re.Pattern) else key
    if not isinstance(pattern, str):
        kind = type(cast(object, key)).__name__
        return f"rule {label}: a rule is a name, a glob or a compiled regex, got {kind}."
    if not isinstance(spec, PartitionSpec):
        return f"rule {label}: expected a PartitionSpec, got {spec!r}. To replicate, say P()."
    if spec.unreduced or spec.reduced:
        return f"rule {label}: {spec!r} asks for a reduction. Name axes only by the dims that they split."
    for axis in axes_of(spec):
        if not isinstance(cast(object, axis), str):
            shown = describe_spec(spec)
            return f"rule {label}: {shown} has {axis!r}. Its parts are names of axes, tuples of them, or None."
    return None


def _hint_at_names(keys: list[str | re.Pattern[str]], names: list[str]) -> list[str]:
    hints = [f"rule {_quote(key)} matches no name." for key in keys]
    # Each looks at every name: for hundreds of wrong rules that would take half a minute.
    for number, key in enumerate(keys[:20]):
        pattern = key if isinstance(key, str) else key.pattern
        for closest in difflib.get_close_matches(pattern, names, n=1, cutoff=0):
            hints[number] += f' The closest name is "{closest}".'
    return hints


def _find_faults(name: str, key: _Key, spec: PartitionSpec, *, shape: tuple[int, ...], mesh: Mesh) -> list[str]:
    shown = describe_spec(spec)
    faults: list[str] = []
    for fault, remedy in find_spec_faults(spec, shape, mesh):
        # An exact rule whose spec the fault shows is not said again.
        is_said = key == name and fault.startswith(shown)
        rule = "" if is_said else f" (rule {_quote(key)}: {shown})"
        faults.append(f"{fault}{rule}. {remedy}")
    return faults


def _trim(spec: PartitionSpec) -> PartitionSpec:
    """Drop the trailing Nones, which split nothing, so that equal splits compare equal."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _quote(key: object) -> str:
    if key is None:
        return "default"
    return f'"{key}"' if isinstance(key, str) else repr(key)


def _report(faults: dict[str, list[str]], hints: list[str], activations: list[str], *, mesh: Mesh) -> str:
    heads: list[str] = []
    if faults:
        heads.append(f"{_count(faults, 'parameter')} cannot be split as asked on mesh {describe_mesh(mesh)}")
    if hints:
        heads.append(f"{_count(hints, 'rule')} {'matches' if len(hints) == 1 else 'match'} nothing")
    if activations:
        heads.append(f"{_count(activations, 'rule')} of activations cannot be followed")

    lines: list[str] = []
    for entry, entry_faults in faults.items():
        lines += [f"{entry}: {fault}" for fault in entry_faults]
    return _list(" and ".join(heads), lines + hints + activations)


def _list(header: str, lines: list[str]) -> str:
    return "\n".join([f"ShardingPlan: {header}.", "", *(f"  {line}" for line in lines)])


def _count(items: Sized, noun: str) -> str:
    plural = "" if len(items) == 1 else "s"
    return f"{len(items)} {noun}{plural}"


PlanFn: TypeAlias = Callable[[torch.nn.Module, Mesh], ShardingPlan]
"""Makes a plan for a model on a mesh, as recipes do."""


def plan_for(plan: ShardingPlan | PlanFn, model: Any, mesh: Mesh) -> ShardingPlan:
    """Return a plan as it is, or what a function of the model and the mesh makes.

    Args:
        plan: What a user gave as a plan.
        model: What the plan is for; recipes refuse what is no module.
        mesh: What a user gave as a mesh.
    """
    if isinstance(plan, ShardingPlan) or not callable(plan):
        check_plan(plan)
        return plan
    check_call(
        "plan", plan, "model", "mesh", hint="Recipes such as ts.plans.fsdp can, and their results are plans too."
    )
    made = plan(model, check_mesh(mesh))
    check_kind("what plan(model, mesh) returns", made, ShardingPlan)
    return made


def check_plan(plan: object) -> None:
    """Refuse what is no plan."""
    hint = "Make one of rules, as in ts.ShardingPlan({...}, default=P())."
    if isinstance(plan, str):
        hint = f"Write plan={_RECIPES.get(plan.lower(), _RECIPES['fsdp'])}, or another recipe of ts.plans."
    check_kind("plan", plan, ShardingPlan, hint=hint)


_RECIPES = {
    **dict.fromkeys(("ddp", "dp", "none", "no_shard", "replicate", "replicated"), "ts.plans.replicated()"),
    **dict.fromkeys(("fsdp", "fsdp2", "full_shard", "zero3"), "ts.plans.fsdp(model, mesh)"),
    **dict.fromkeys(("hsdp", "hybrid_shard"), "ts.plans.hsdp(model, mesh)"),
    **dict.fromkeys(("tp", "tensor_parallel"), "ts.plans.tp(model, mesh)"),
    **dict.fromkeys(("fsdp_tp", "fsdp+tp", "2d"), "ts.plans.fsdp_tp(model, mesh)"),
    **dict.fromkeys(("auto", "hf", "from_hf"), "ts.plans.from_hf(model, mesh)"),
}
"""What is written for the words that other libraries have for a plan."""


def in_form_of(plan: ShardingPlan, other: ShardingPlan) -> ShardingPlan:
    """The rules of a plan for entries that are stored as another plan has them."""
    ranks: dict[tuple[str, _Rule], int] = {}
    for kind, ranked in (("rules", plan.ranks), ("stored", other.ranks)):
        ranks |= {key: rank for key, rank in ranked.items() if key[0] == kind}
    return replace(plan, stored=other.stored, ranks=ranks, activations={}, context=None, pipeline=None)
