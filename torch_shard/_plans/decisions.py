"""What a recipe decides for each entry, and the plan that says it in few rules."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import collections
import contextlib
import contextvars
import logging
import math
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from jax.sharding import Mesh, PartitionSpec
from rich.filesize import decimal
from torch.nn.parameter import is_lazy

from torch_shard._common.caller import caller
from torch_shard._plans.roles import LORA, is_table, kernels_of, product_of
from torch_shard._sharding import (
    Context,
    Padded,
    Pieces,
    ShardingPlan,
    axes_of,
    describe_mesh,
    describe_spec,
    make_matcher,
    named_tensors,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

_QUIET: contextvars.ContextVar[bool] = contextvars.ContextVar("quiet", default=False)

Axes = str | tuple[str, ...]
"""One axis of a mesh, or several that split as one."""

SMALL = 2**16
"""Elements. A vector with fewer stays whole: its bytes are nothing, and a gather costs as long as a message takes."""

_FACTOR = re.compile(r"(.*)\.lora_(?:embedding_)?([ABab])(?:\..*)?")
"""Names of the two matrices of a LoRA adapter: where it is, and which of them."""


@dataclass(frozen=True)
class Decision:
    """How one entry is split.

    Attributes:
        spec: Of the entry in torch's own shape.
        reason: Why, in a few words.
        fault: What kept it from being split, where it should have been.
        form: How a step stores it, if not in torch's form.
    """

    spec: PartitionSpec
    reason: str
    fault: str = ""
    form: Pieces | Padded | None = None

    def say(self, entry: torch.Tensor) -> str:
        """The reason, with the fault, and with the bytes of an entry that stays whole for it."""
        held = "" if any(self.spec) or not self.fault else f"whole, {describe_bytes(entry)} on each device"
        return "; ".join(filter(None, (self.reason, self.fault, held)))


@contextlib.contextmanager
def quietly() -> Generator[None, None, None]:
    """Make plans without warnings within, where many are made to be compared; their reasons say the same."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def warn(message: str) -> None:
    """Warn by the logger, unless plans are made quietly."""
    if not _QUIET.get():
        logger.warning("%s", message)


def describe_bytes(entry: torch.Tensor) -> str:
    """The size of an entry."""
    return decimal(entry.numel() * entry.element_size())


def entries_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, by name; a tie under each of its names."""
    entries = named_tensors(model)
    if lazy := [name for name, entry in entries.items() if is_lazy(entry)]:
        raise ValueError(
            f"{caller()}: {', '.join(lazy)}: lazy, without a shape yet. Call the model once on example inputs."
        )
    return entries


def names_of(axes: Axes | None) -> tuple[str, ...]:
    """Axes one by one."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def size_of(axes: Axes | None, mesh: Mesh) -> int:
    """Into how many shards they split."""
    return math.prod(mesh.shape[axis] for axis in names_of(axes))


def with_sizes(axes: Axes | None, mesh: Mesh) -> str:
    """Axes and their sizes, for what is said."""
    return " x ".join(f"{name}={mesh.shape[name]}" for name in names_of(axes))


def find_uneven(
    entry: torch.Tensor, dim: int, axes: Axes | None, mesh: Mesh, *, pieces: int = 1, heads: int = 0
) -> str:
    """Say that a dim, each of its pieces, or the heads in one do not divide over these axes; empty if they do."""
    if entry.shape[dim] % (size_of(axes, mesh) * pieces):
        packed = f" of {pieces} pieces" if pieces > 1 else ""
        return f"dim {dim} = {entry.shape[dim]}{packed} is not a multiple of {with_sizes(axes, mesh)}"
    if heads % size_of(axes, mesh):
        return f"{heads} heads are not a multiple of {with_sizes(axes, mesh)}, and would be cut"
    return ""


def listed(head: str, lines: Iterable[str]) -> str:
    """What is wrong, line by line below what was called."""
    return "\n".join([f"{caller()}: {head}", "", *(f"  {line}" for line in lines)])


def along(dim: int, ndim: int, axes: Axes) -> PartitionSpec:
    """The spec that splits one dim."""
    return PartitionSpec(*(axes if at == dim else None for at in range(ndim)))


def check_axes(mesh: Mesh, **given: Axes | None) -> None:
    """Refuse axes that the mesh lacks, and one axis for two things."""
    for argument, axes in given.items():
        parts = cast(tuple[object, ...], axes) if isinstance(axes, tuple) else (axes,)
        if axes is not None and not all(isinstance(part, str) for part in parts):
            raise TypeError(f"{caller()}: {argument} must be the name of an axis, or a tuple of some, got {axes!r}.")
    asked = [(argument, axis) for argument, axes in given.items() for axis in names_of(axes)]
    faults = [f'{argument}="{axis}" names no axis of it.' for argument, axis in asked if axis not in mesh.shape]
    axes = [axis for _, axis in asked]
    faults += [f'axis "{axis}" is given twice.' for axis in dict.fromkeys(axes) if axes.count(axis) > 1]
    if faults:
        raise ValueError(
            f"{caller()}: on the mesh {describe_mesh(mesh)}: {' '.join(faults)} Give axes that it has, each once, or a "
            f"mesh of these: make_mesh({', '.join(f'{axis}=...' for axis in dict.fromkeys(axes))})."
        )


def completed(
    model: torch.nn.Module,
    split: Mapping[str, Decision],
    mesh: Mesh,
    *,
    fsdp: Axes | None = None,
    tables: Collection[int] = (),
    notes: Mapping[str, str] | None = None,
) -> dict[str, Decision]:
    """Decisions for all entries: adapters follow their base layer, the names of a tie the first that is split.

    Args:
        model: Whose entries they are.
        split: What is decided already, for each parameter but those of adapters.
        mesh: Where it will lie.
        fsdp: The axes over which parameters are split once more, for storage.
        tables: Entries that are split by their last dim there, by id.
        notes: What else is said of entries that are split there, by name.
    """
    entries, kernels, made = entries_of(model), kernels_of(model), dict(split)
    made |= {n: _of_adapter(model, n, made, mesh) for n in entries if LORA in n and n not in made}
    first: dict[int, str] = {}  # of the names of each tensor
    for name in sorted(filter(made.__contains__, entries), key=lambda name: not any(made[name].spec)):
        first.setdefault(id(entries[name]), name)
    found = dict.fromkeys(entries, Decision(PartitionSpec(), "a buffer"))
    for name, entry in entries.items():
        if (other := first.get(id(entry))) is None:
            continue
        tied = made[other]
        if other != name:
            tied = replace(tied, reason=", ".join(filter(None, (tied.reason, f"as {other}"))))
        left = tuple(axis for axis in names_of(fsdp) if axis not in axes_of(tied.spec))
        shape = entry.shape[:2] if id(entry) in kernels else entry.shape
        found[name] = _stored(tied, shape, left, mesh, last_first=id(entry) in tables) if left else tied
        if notes and name in notes and found[name].spec != tied.spec:
            found[name] = replace(found[name], reason=f"{found[name].reason}; {notes[name]}")
    return found


def _of_adapter(model: torch.nn.Module, name: str, split: Mapping[str, Decision], mesh: Mesh) -> Decision:
    """How a matrix of a LoRA adapter (Hu et al., 2021) is split: as the dim of its base layer that it shares."""
    factor, entry = _FACTOR.fullmatch(name), model.get_parameter(name)
    places = (f"{factor[1]}.base_layer", factor[1]) if factor else ()
    base = next((place for place in places if f"{place}.weight" in split), None)
    if factor is None or base is None:
        return Decision(PartitionSpec(), "of an adapter: whole")
    layer, decision = model.get_submodule(base), split[f"{base}.weight"]
    product = product_of(layer)
    out_dim = product.out_dim if product is not None else int(is_table(layer))  # a table is (vocabulary, width)
    shared, dim = (out_dim, 0) if factor[2] in "Bb" else (1 - out_dim, 1)
    told, axes = f"of an adapter: as its base layer, {decision.reason}", [*decision.spec, None, None][shared]
    is_matrix = layer.get_parameter("weight").ndim == 2 and entry.ndim > dim
    if axes is None or not is_matrix or find_uneven(entry, dim, axes, mesh):
        return Decision(PartitionSpec(), told)
    form = decision.form if isinstance(decision.form, Pieces) and decision.form.dim == shared else None
    return Decision(PartitionSpec(*(None,) * dim, axes), told, form=form and replace(form, dim=dim))


def _stored(made: Decision, shape: torch.Size, axes: Axes, mesh: Mesh, *, last_first: bool) -> Decision:
    """The decision with one more split, for storage: of the first whole dim that divides, else of one that is split.

    A table is split by its features: each device then looks up its own of all rows of the batch, and has the others of
    its rows sent; by its words, it would hold all features of all rows, to be summed over the devices.
    """
    if len(shape) < 2 and shape.numel() < SMALL:
        return made if made.reason else Decision(made.spec, "a small vector")
    sizes = shape if made.form is None else made.form.split_shape(shape)
    parts = [*made.spec, *(None for _ in range(len(sizes) - len(made.spec)))]
    dims = reversed(range(len(sizes))) if last_first else range(len(sizes))
    for dim in sorted(dims, key=lambda dim: parts[dim] is not None):
        split = (*names_of(parts[dim]), *names_of(axes))
        if sizes[dim] and sizes[dim] % size_of(split, mesh) == 0:
            parts[dim] = split
            why = f"fully sharded over {'+'.join(names_of(axes))}"
            return replace(made, spec=PartitionSpec(*parts), reason="; ".join(filter(None, (made.reason, why))))
    fault = f"no dim of {tuple(shape)} is a multiple of {with_sizes(axes, mesh)}"
    return replace(made, fault="; ".join(filter(None, (made.fault, fault))))


def plan_of(
    model: torch.nn.Module,
    decisions: Mapping[str, Decision],
    *,
    strict: bool = False,
    activations: Mapping[str, PartitionSpec] | None = None,
    context: Context | None = None,
) -> ShardingPlan:
    """The plan of these decisions, with one rule for all layers of which the same holds.

    Args:
        model: Whose entries they are.
        decisions: For each entry, by name.
        strict: Whether an entry that could not be split is an error, and not a warning of the logger.
        activations: As `ShardingPlan` takes them.
        context: As `ShardingPlan` takes it.

    Raises:
        ValueError: With `strict`, entries could not be split; all of them, with their bytes.
    """
    entries = entries_of(model)
    if lines := _unsplit(entries, decisions):
        head = f"{len(lines)} {'entry does' if len(lines) == 1 else 'entries do'} not divide over the mesh."
        if strict:
            remedy = "Choose sizes or a mesh that divide, or strict=False, which keeps such entries whole."
            raise ValueError(listed(f"{head} {remedy}", lines))
        warn(listed(head, lines))
    said = with_globs({n: (d.spec, d.say(entries[n])) for n, d in decisions.items()}, entries)
    rules = {key: spec for key, (spec, _) in said.items()}
    reasons: dict[str | re.Pattern[str], str] = {key: reason for key, (_, reason) in said.items()}
    names = collections.Counter(map(id, entries.values()))  # a tie has several, and no pieces
    forms = {
        n: d.form
        for n, d in decisions.items()
        if isinstance(d.form, Padded) or (d.form is not None and names[id(entries[n])] == 1)
    }
    stored = with_globs(forms, entries)
    return ShardingPlan(rules, reasons=reasons, activations=dict(activations or {}), stored=stored, context=context)


def _unsplit(entries: Mapping[str, torch.Tensor], decisions: Mapping[str, Decision]) -> list[str]:
    """Entries that could not be split, each tensor once."""
    lines: dict[int, str] = {}
    for name, decision in decisions.items():
        if decision.fault:
            entry = entries[name]
            split = "whole" if not any(decision.spec) else describe_spec(decision.spec)
            held = f"{name} {tuple(entry.shape)}, {describe_bytes(entry)}, {split}"
            lines.setdefault(id(entry), ": ".join(filter(None, (held, decision.reason, decision.fault))))
    return list(lines.values())


def with_globs(values: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """The same values by fewer rules: a glob in place of the numbers of layers, where it says the same of all."""
    parts = {name: name.partition(":") for name in values}  # after the colon comes a place within a module
    keys = {n: re.sub(r"(?<![^.])\d+(?![^.])", "*", path) + colon + rest for n, (path, colon, rest) in parts.items()}
    alike: dict[str, bool] = {}
    for key, value in {key: values[name] for name, key in keys.items()}.items():
        matches = make_matcher(key)
        matched = [name for name in names if matches(name)]
        alike[key] = len(matched) > 1 and all(name in values and values[name] == value for name in matched)
    return {key if alike[key] else name: values[name] for name, key in keys.items()}


def places_with_globs(values: Mapping[str, T], model: torch.nn.Module) -> dict[str, T]:
    """The same values of places in modules (`"name"`, `"name:argument"`) by fewer rules."""
    names = {path for path, _ in model.named_modules()}
    suffixes = {key.partition(":")[2] for key in values}
    return with_globs(values, [f"{name}:{suffix}" if suffix else name for name in names for suffix in suffixes])
