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
from torch_shard._common.specs import axes_of, describe_mesh, describe_spec
from torch_shard._entries import named_tensors
from torch_shard._plans.roles import LORA, is_table, kernels_of, product_of
from torch_shard._sharding import Context, Padded, Pieces, ShardingPlan, make_matcher

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
        size = ""
        if self.fault and not any(self.spec):
            size = f"whole, {describe_bytes(entry)} on each device"
        return "; ".join(filter(None, (self.reason, self.fault, size)))


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
    lazy = [name for name, entry in entries.items() if is_lazy(entry)]
    if lazy:
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
    num_shards = size_of(axes, mesh)
    if entry.shape[dim] % (num_shards * pieces):
        packed = f" of {pieces} pieces" if pieces > 1 else ""
        return f"dim {dim} = {entry.shape[dim]}{packed} is not a multiple of {with_sizes(axes, mesh)}"
    # A shard with a part of a head would need the others' for its softmax.
    if heads % num_shards:
        return f"{heads} heads are not a multiple of {with_sizes(axes, mesh)}, and would be cut"
    return ""


def listed(head: str, lines: Iterable[str]) -> str:
    """What is wrong, line by line below what was called."""
    return "\n".join([f"{caller()}: {head}", "", *(f"  {line}" for line in lines)])


def along(dim: int, ndim: int, axes: Axes) -> PartitionSpec:
    """The spec that splits one dim."""
    return PartitionSpec(*(axes if at == dim else None for at in range(ndim)))


def check_axes(mesh: Mesh, **arguments: Axes | None) -> None:
    """Refuse axes that the mesh lacks, and one axis for two things."""
    named = list[tuple[str, str]]()
    for argument, axes in arguments.items():
        parts = cast(tuple[object, ...], axes) if isinstance(axes, tuple) else (axes,)
        if axes is not None and not all(isinstance(part, str) for part in parts):
            raise TypeError(f"{caller()}: {argument} must be the name of an axis, or a tuple of some, got {axes!r}.")
        named += [(argument, axis) for axis in names_of(axes)]

    faults = [f'{argument}="{axis}" names no axis of it.' for argument, axis in named if axis not in mesh.shape]
    counts = collections.Counter(axis for _, axis in named)
    faults += [f'axis "{axis}" is given twice.' for axis, count in counts.items() if count > 1]
    if faults:
        raise ValueError(
            f"{caller()}: on the mesh {describe_mesh(mesh)}: {' '.join(faults)} Give axes that it has, each once, or a "
            f"mesh of these: make_mesh({', '.join(f'{axis}=...' for axis in counts)})."
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
    entries = entries_of(model)
    kernels = kernels_of(model)
    by_name = dict(split)
    for name in entries:
        if LORA in name and name not in by_name:
            by_name[name] = _of_adapter(model, name, by_name, mesh)

    # A tie has several names and one place: that of the first name that is split, or else of the first.
    leading: dict[int, str] = {}
    decided = [name for name in entries if name in by_name]
    for name in sorted(decided, key=lambda name: not any(by_name[name].spec)):
        leading.setdefault(id(entries[name]), name)

    decisions = dict[str, Decision]()
    for name, entry in entries.items():
        leader = leading.get(id(entry))
        if leader is None:
            decisions[name] = Decision(PartitionSpec(), "a buffer")
            continue
        decision = by_name[leader]
        if leader != name:
            decision = replace(decision, reason=", ".join(filter(None, (decision.reason, f"as {leader}"))))

        unused_axes = tuple(axis for axis in names_of(fsdp) if axis not in axes_of(decision.spec))
        stored = decision
        if unused_axes:
            # Of a kernel the channels alone are split, for it is used whole.
            shape = entry.shape[:2] if id(entry) in kernels else entry.shape
            stored = _stored(decision, shape, unused_axes, mesh, last_first=id(entry) in tables)
        if notes and name in notes and stored.spec != decision.spec:
            stored = replace(stored, reason=f"{stored.reason}; {notes[name]}")
        decisions[name] = stored
    return decisions


def _of_adapter(model: torch.nn.Module, name: str, split: Mapping[str, Decision], mesh: Mesh) -> Decision:
    """How a matrix of a LoRA adapter (Hu et al., 2021) is split: as the dim of its base layer that it shares."""
    factor = _FACTOR.fullmatch(name)
    places = (f"{factor[1]}.base_layer", factor[1]) if factor else ()
    base = next((place for place in places if f"{place}.weight" in split), None)
    if factor is None or base is None:
        return Decision(PartitionSpec(), "of an adapter: whole")

    # An adapter adds B A to the weight: B has its outputs, as rows, and A its inputs, as columns.
    layer = model.get_submodule(base)
    decision = split[f"{base}.weight"]
    product = product_of(layer)
    out_dim = product.out_dim if product is not None else int(is_table(layer))  # a table is (vocabulary, width)
    shared_dim, dim = (out_dim, 0) if factor[2] in "Bb" else (1 - out_dim, 1)
    reason = f"of an adapter: as its base layer, {decision.reason}"
    axes = [*decision.spec, None, None][shared_dim]

    entry = model.get_parameter(name)
    is_matrix = layer.get_parameter("weight").ndim == 2 and entry.ndim > dim
    if axes is None or not is_matrix or find_uneven(entry, dim, axes, mesh):
        return Decision(PartitionSpec(), reason)
    form = None
    if isinstance(decision.form, Pieces) and decision.form.dim == shared_dim:
        form = replace(decision.form, dim=dim)
    return Decision(PartitionSpec(*(None,) * dim, axes), reason, form=form)


def _stored(decision: Decision, shape: torch.Size, axes: Axes, mesh: Mesh, *, last_first: bool) -> Decision:
    """The decision with one more split, for storage: of the first whole dim that divides, else of one that is split.

    A table is split by its features: each device then looks up its own of all rows of the batch, and has the others of
    its rows sent; by its words, it would hold all features of all rows, to be summed over the devices.
    """
    if len(shape) < 2 and shape.numel() < SMALL:
        return decision if decision.reason else Decision(decision.spec, "a small vector")
    sizes = shape if decision.form is None else decision.form.split_shape(shape)
    parts = [*decision.spec, *(None for _ in range(len(sizes) - len(decision.spec)))]

    dims = list(range(len(sizes)))
    if last_first:
        dims.reverse()
    whole_first = sorted(dims, key=lambda dim: parts[dim] is not None)
    for dim in whole_first:
        all_axes = (*names_of(parts[dim]), *names_of(axes))
        if sizes[dim] and sizes[dim] % size_of(all_axes, mesh) == 0:
            parts[dim] = all_axes
            why = f"fully sharded over {'+'.join(names_of(axes))}"
            reason = "; ".join(filter(None, (decision.reason, why)))
            return replace(decision, spec=PartitionSpec(*parts), reason=reason)
    fault = f"no dim of {tuple(shape)} is a multiple of {with_sizes(axes, mesh)}"
    return replace(decision, fault="; ".join(filter(None, (decision.fault, fault))))


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
    lines = _unsplit(entries, decisions)
    if lines:
        head = f"{len(lines)} {'entry does' if len(lines) == 1 else 'entries do'} not divide over the mesh."
        if strict:
            remedy = "Choose sizes or a mesh that divide, or strict=False, which keeps such entries whole."
            raise ValueError(listed(f"{head} {remedy}", lines))
        warn(listed(head, lines))

    # A rule stands for entries with one spec and one reason, or the table would give a reason that is another's.
    with_reasons = {name: (decision.spec, decision.say(entries[name])) for name, decision in decisions.items()}
    rules = dict[str, PartitionSpec]()
    reasons = dict[str | re.Pattern[str], str]()
    for key, (spec, reason) in with_globs(with_reasons, entries).items():
        rules[key] = spec
        reasons[key] = reason

    # What is tied is read in two ways (a table and a head), and cannot be in pieces for both.
    num_names = collections.Counter(map(id, entries.values()))
    forms = dict[str, Pieces | Padded]()
    for name, decision in decisions.items():
        is_tied = num_names[id(entries[name])] > 1
        if isinstance(decision.form, Padded) or (decision.form is not None and not is_tied):
            forms[name] = decision.form
    stored = with_globs(forms, entries)
    return ShardingPlan(rules, reasons=reasons, activations=dict(activations or {}), stored=stored, context=context)


def _unsplit(entries: Mapping[str, torch.Tensor], decisions: Mapping[str, Decision]) -> list[str]:
    """Entries that could not be split, each tensor once."""
    lines: dict[int, str] = {}
    for name, decision in decisions.items():
        if not decision.fault:
            continue
        entry = entries[name]
        split = describe_spec(decision.spec) if any(decision.spec) else "whole"
        about = f"{name} {tuple(entry.shape)}, {describe_bytes(entry)}, {split}"
        lines.setdefault(id(entry), ": ".join(filter(None, (about, decision.reason, decision.fault))))
    return list(lines.values())


def with_globs(values: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """The same values by fewer rules: a glob in place of the numbers of layers, where it says the same of all."""
    globs = dict[str, str]()
    for name in values:
        path, colon, place = name.partition(":")  # after the colon comes a place within a module
        globs[name] = re.sub(r"(?<![^.])\d+(?![^.])", "*", path) + colon + place

    # A glob is right if all that it matches have one value: names without a value, too, must not be among them.
    is_right: dict[str, bool] = {}
    for name, glob in globs.items():
        if glob in is_right:
            continue
        matches = make_matcher(glob)
        matched = [other for other in names if matches(other)]
        same = all(other in values and values[other] == values[name] for other in matched)
        is_right[glob] = len(matched) > 1 and same
    return {glob if is_right[glob] else name: values[name] for name, glob in globs.items()}


def places_with_globs(values: Mapping[str, T], model: torch.nn.Module) -> dict[str, T]:
    """The same values of places in modules (`"name"`, `"name:argument"`) by fewer rules."""
    names = {path for path, _ in model.named_modules()}
    suffixes = {key.partition(":")[2] for key in values}
    return with_globs(values, [f"{name}:{suffix}" if suffix else name for name in names for suffix in suffixes])
