"""Plans of how entries are split: rules from names to specs, checked against shapes before anything moves."""

# What a module holds, PyTorch keeps in attributes with an underscore, and annotates in part.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias, cast

import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from torch.nn.parameter import is_lazy

from torch_shard._common.caller import public
from torch_shard._common.types import PyTree
from torch_shard._sharding.activations import Constraint, find_type_fault, resolve_activations
from torch_shard._sharding.entries import group_ties
from torch_shard._sharding.mesh import axes_of, check_mesh, describe_mesh, describe_spec, find_spec_faults
from torch_shard._sharding.patterns import make_matcher


@dataclass(frozen=True)
class ResolvedEntry:
    """A plan's decision for one name.

    Attributes:
        shape: Global shape.
        dtype: As found, torch's or numpy's; None where only a shape was given.
        rule: The rule that decided, quoted, or `default`.
        sharding: The sharding.
        tied_to: The first name of the same tensor, where this is another one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | np.dtype | None
    rule: str
    sharding: NamedSharding
    tied_to: str | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's shard."""
        return self.sharding.shard_shape(self.shape)

    def count_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Count the bytes of `shape` in this entry's dtype; None if that is unknown."""
        return None if self.dtype is None else math.prod(shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedPlan(Mapping[str, NamedSharding]):
    """Shardings by name, as `ShardingPlan.resolve` gives them; printed, a table with bytes per device.

    JAX takes plain dicts for trees: give it `dict(resolved)`. Sums of bytes take a tie once, and are
    None if a dtype is unknown.

    Attributes:
        mesh: The mesh of every sharding.
        entries: Shape, dtype, rule and sharding by name.
        activations: What it asks for of what modules take and return.
    """

    mesh: Mesh
    entries: Mapping[str, ResolvedEntry]
    activations: tuple[Constraint, ...] = ()

    def __getitem__(self, name: str) -> NamedSharding:
        return self.entries[name].sharding

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the whole."""
        return self._sum(lambda entry: entry.shape)

    @property
    def num_bytes_per_device(self) -> int | None:
        """Bytes that each device holds."""
        return self._sum(lambda entry: entry.local_shape)

    @property
    def fraction_replicated(self) -> float | None:
        """Share of the bytes that every device holds whole."""
        whole = self._sum(lambda entry: entry.shape if entry.sharding.is_fully_replicated else (0,))
        return None if whole is None else whole / max(self.num_bytes or 0, 1)

    def _sum(self, get_shape: Callable[[ResolvedEntry], tuple[int, ...]]) -> int | None:
        counts = [entry.count_bytes(get_shape(entry)) for entry in self.entries.values() if not entry.tied_to]
        return None if None in counts else sum(filter(None, counts))

    def __repr__(self):
        return f"ResolvedPlan(num_names={len(self)}, mesh={describe_mesh(self.mesh)})"

    def __str__(self):
        # So wide that no name is folded.
        console = Console(width=10_000, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    def __rich__(self) -> Table:
        share = "-" if self.fraction_replicated is None else f"{self.fraction_replicated:.1%}"
        total, held = _describe_bytes(self.num_bytes), _describe_bytes(self.num_bytes_per_device)
        caption = f"total {total}, per device {held}, replicated {share}"
        table = Table(title=f"ShardingPlan on mesh {describe_mesh(self.mesh)}", caption=caption)
        for heading in ("name", "shape", "dtype", "rule", "spec", "local shape", "bytes per device"):
            table.add_column(heading, overflow="fold", justify="right" if "bytes" in heading else "left")
        for name, entry in self.entries.items():
            dtype = "-" if entry.dtype is None else str(entry.dtype).removeprefix("torch.")
            spec, local_shape = describe_spec(entry.sharding.spec), entry.local_shape
            held = f"in {entry.tied_to}" if entry.tied_to else _describe_bytes(entry.count_bytes(local_shape))
            cells = (name, entry.shape, dtype, entry.rule, spec, local_shape, held)
            table.add_row(*(Text(str(cell)) for cell in cells))
        for asked in self.activations:
            cells = (asked.place, "-", "-", f'"{asked.rule}"', describe_spec(asked.spec), "-", "-")
            table.add_row(*(Text(str(cell)) for cell in cells))
        return table


def _describe_bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else decimal(num_bytes)


Rules: TypeAlias = Mapping[str, PartitionSpec] | Mapping[str | re.Pattern[str], PartitionSpec]

_Rule: TypeAlias = str | re.Pattern[str]

_Key: TypeAlias = _Rule | None  # of a rule; None is the default's


@dataclass(frozen=True, repr=False)
class ShardingPlan:
    """Rules that give every entry of a model, by its `state_dict` name, a `PartitionSpec`.

    A rule is an exact name, a glob over dotted segments (`*` is any text within one segment, `**` any
    number of whole segments, also none), or a compiled regex that must match the whole name. Order
    never matters: an exact name beats a pattern, and two patterns that give one name different specs
    are an error. A plan is immutable; it meets a model and a mesh only in `resolve`.

    Args:
        rules: Specs by exact name, glob or compiled regex.
        default: Spec of the names that no rule matches. Without it such a name is an error:
            replication is never silent, it is asked for with `default=P()`.
        activations: Specs of what modules take and return, which a step keeps so, and its gradient too; it never
            changes a number. By name or glob of modules, `"model.layers.*"`: what it returns; `"lm_head:input"`: an
            argument of its forward; `"encoder:return.last_hidden_state"`, `"block:states.0"`: a part of either, by
            the names of attributes, keys or numbers. The others are the compiler's choice.

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

    def __post_init__(self):
        _check_mapping("rules", self.rules)
        _check_mapping("activations", self.activations)
        rules = dict(self._specs)
        object.__setattr__(self, "rules", MappingProxyType(rules))
        object.__setattr__(self, "activations", MappingProxyType(dict(self.activations)))
        faults = [_find_type_fault(_quote(key), key, spec) for key, spec in self.rules.items()]
        faults += [] if self.default is None else [_find_type_fault("default", "", self.default)]
        faults += [find_type_fault(key, spec) for key, spec in self.activations.items()]
        if lines := [fault for fault in faults if fault]:
            raise TypeError(_list(f"{_count(lines, 'rule')} cannot be read", lines))
        loose = [key for key in rules if isinstance(key, str) and re.search(r"[^.]\*\*|\*\*[^.]", key)]
        if loose:
            lines = [f'rule "{key}": ** stands for whole segments. Use * within one.' for key in loose]
            raise ValueError(_list(f"{_count(lines, 'rule')} cannot be read", lines))

    @property
    def _specs(self) -> Mapping[_Rule, PartitionSpec]:
        return cast(Mapping[_Rule, PartitionSpec], self.rules)  # its keys may all be strings

    def __hash__(self):
        return hash((frozenset(self.rules.items()), self.default, frozenset(self.activations.items())))

    def __reduce__(self):  # a mappingproxy can be neither copied nor pickled
        return partial(ShardingPlan, default=self.default, activations=dict(self.activations)), (dict(self.rules),)

    def __repr__(self):
        rules = ", ".join(f"{key!r}: {describe_spec(spec)}" for key, spec in self.rules.items())
        default = "" if self.default is None else f", default={describe_spec(self.default)}"
        asked = ", ".join(f"{key!r}: {describe_spec(spec)}" for key, spec in self.activations.items())
        return f"ShardingPlan({{{rules}}}{default}{f', activations={{{asked}}}' if asked else ''})"

    @public
    def resolve(self, source: torch.nn.Module | Mapping[str, PyTree], mesh: Mesh) -> ResolvedPlan:
        """Give every entry its sharding on `mesh`, or say of all that cannot have one why not.

        Reads names and shapes only, so meta tensors will do; nothing is placed or traced. The names of
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
        values = _read(source)
        matchers = {key: make_matcher(key) for key in self.rules}
        hits: dict[str, list[_Rule]] = {
            name: [key for key, matches in matchers.items() if matches(name)] for name in values
        }
        entries: dict[str, ResolvedEntry] = {}
        faults: dict[str, list[str]] = {}
        for names in group_ties(values, by_identity=isinstance(source, torch.nn.Module)):
            name, key, spec, clash = self._choose(names, hits)
            shape = _get_shape(values[name])
            found = [clash] if clash else _find_faults(name, key, spec, shape=shape, mesh=mesh)
            if found:
                faults[f"{name} {shape}"] = found
                continue
            dtype = getattr(values[name], "dtype", None)
            first = ResolvedEntry(shape, dtype, _quote(key), NamedSharding(mesh, spec))
            entries |= {names[0]: first} | {alias: replace(first, tied_to=names[0]) for alias in names[1:]}
        is_model = isinstance(source, torch.nn.Module)  # without modules the activations are nowhere
        constraints, wrong = resolve_activations(self.activations, source, mesh) if is_model else ([], [])
        unused = set(self.rules).difference(*hits.values())
        if faults or unused or wrong:
            hints = _hint_at_names([key for key in self.rules if key in unused], list(values))
            raise ValueError(_report(faults, hints, wrong, mesh=mesh))
        return ResolvedPlan(mesh, MappingProxyType({name: entries[name] for name in values}), tuple(constraints))

    def _choose(self, names: list[str], hits: dict[str, list[_Rule]]) -> tuple[str, _Key, PartitionSpec, str | None]:
        """Choose the rule of one tensor: which of its `names` matches, the rule's key and spec, any clash."""
        owners: dict[PartitionSpec, tuple[str, _Rule]] = {}
        for name in names:
            keys: list[_Rule] = [name] if name in hits[name] else hits[name]
            for key in keys:
                owners.setdefault(_trim(self._specs[key]), (name, key))
        if not owners:
            clash = f'no rule matches it. Add one, such as "{names[0]}": P(), or give the plan default=P().'
            return names[0], None, self.default or PartitionSpec(), clash if self.default is None else None
        (name, key), *others = owners.values()
        if not others:
            return name, key, self._specs[key], None
        asked = (f"rule {_quote(key)}: {describe_spec(self._specs[key])}" for _, key in owners.values())
        clash = f"{' and '.join(asked)} give it different specs."
        if tied := [other for other, _ in others if other != name]:
            clash = f"it is tied to {tied[0]}, and {clash} Give both names one spec, or only one a rule."
        else:
            clash += f' Add a rule for "{name}" itself, or narrow the patterns.'
        return name, key, self._specs[key], clash


def _check_mapping(what: str, rules: object) -> None:
    if not isinstance(rules, Mapping):
        raise TypeError(f"ShardingPlan: {what} must map names to specs, got {type(rules).__name__}.")


def _read(source: object) -> dict[str, PyTree]:
    """Collect what `source` holds, by name, and refuse what has no shape."""
    if isinstance(source, torch.nn.Module):
        values: dict[str, PyTree] = dict(source.named_parameters(remove_duplicate=False))
        values |= dict(source.named_buffers(remove_duplicate=False))
    elif isinstance(source, Mapping):
        values = dict(cast(Mapping[str, PyTree], source))
    else:
        raise TypeError(f"ShardingPlan.resolve: expected a module or a mapping, got {type(source).__name__}.")
    faults = {name: _find_shape_fault(name, value) for name, value in values.items()}
    if lines := [f"{name}: {fault}" for name, fault in faults.items() if fault]:
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
    kind = type(key).__name__
    if not isinstance(cast(re.Pattern[str], key).pattern if isinstance(key, re.Pattern) else key, str):
        return f"rule {label}: a rule is a name, a glob or a compiled regex, got {kind}."
    if not isinstance(spec, PartitionSpec):
        return f"rule {label}: expected a PartitionSpec, got {spec!r}. To replicate, say P()."
    if spec.unreduced or spec.reduced:
        return f"rule {label}: {spec!r} asks for a reduction. Name axes only by the dims that they split."
    if odd := [axis for axis in axes_of(spec) if not isinstance(cast(object, axis), str)]:
        return (
            f"rule {label}: {describe_spec(spec)} has {odd[0]!r}. Its parts are names of axes, tuples of them, or None."
        )
    return None


def _hint_at_names(keys: list[str | re.Pattern[str]], names: list[str]) -> list[str]:
    hints = [f"rule {_quote(key)} matches no name." for key in keys]
    # Each looks at every name: for hundreds of wrong rules that would take half a minute.
    for number, key in enumerate(keys[:20]):
        wanted = key if isinstance(key, str) else key.pattern
        for closest in difflib.get_close_matches(wanted, names, n=1, cutoff=0):
            hints[number] += f' The closest name is "{closest}".'
    return hints


def _get_shape(value: PyTree) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", value))


def _find_faults(name: str, key: _Key, spec: PartitionSpec, *, shape: tuple[int, ...], mesh: Mesh) -> list[str]:
    shown = describe_spec(spec)
    faults: list[str] = []
    for fault, remedy in find_spec_faults(spec, shape, mesh):
        known = key == name and fault.startswith(shown)
        rule = "" if known else f" (rule {_quote(key)}: {shown})"
        faults.append(f"{fault}{rule}. {remedy}")
    return faults


def _trim(spec: PartitionSpec) -> PartitionSpec:
    """Drop the trailing Nones, which split nothing, so that equal splits compare equal."""
    num_parts = max((dim + 1 for dim, part in enumerate(spec) if part is not None), default=0)
    return PartitionSpec(*spec[:num_parts])


def _quote(key: object) -> str:
    return "default" if key is None else f'"{key}"' if isinstance(key, str) else repr(key)


def _report(faults: dict[str, list[str]], hints: list[str], activations: list[str], *, mesh: Mesh) -> str:
    heads: list[str] = []
    if faults:
        heads.append(f"{_count(faults, 'parameter')} cannot be split as asked on mesh {describe_mesh(mesh)}")
    if hints:
        heads.append(f"{_count(hints, 'rule')} {'matches' if len(hints) == 1 else 'match'} nothing")
    if activations:
        heads.append(f"{_count(activations, 'rule')} of activations cannot be followed")
    lines = [f"{entry}: {fault}" for entry, found in faults.items() for fault in found]
    return _list(" and ".join(heads), lines + hints + activations)


def _list(header: str, lines: list[str]) -> str:
    return "\n".join([f"ShardingPlan: {header}.", "", *(f"  {line}" for line in lines)])


def _count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
