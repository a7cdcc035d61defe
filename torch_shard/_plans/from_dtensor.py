"""Plans of `torch.distributed.tensor.parallel.parallelize_module`, read."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, cast

import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.validate import check_kind, is_integer
from torch_shard._common.wrappers import check_module
from torch_shard._plans.decisions import (
    Axes,
    Decision,
    along,
    check_axes,
    completed,
    find_uneven,
    places_with_globs,
    plan_of,
)
from torch_shard._sharding import ShardingPlan, check_mesh

if TYPE_CHECKING:  # their import takes a second, which only who uses them pays
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

    from torch_shard._plans.dtensor_layouts import Layouts

logger = logging.getLogger(__name__)


@error_prefix("plans.from_dtensor")
def from_dtensor(
    model: nn.Module,
    mesh: Mesh,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle],
    *,
    tp: str = "model",
    fsdp: Axes | None = None,
    batch_spec: PartitionSpec | None = None,
    ndim: int | Mapping[str, int] = 3,
    strict: bool = False,
) -> ShardingPlan:
    """Read a plan of PyTorch's `parallelize_module`: its styles by the names of modules.

    Parameters are split as there (`ColwiseParallel` and `RowwiseParallel` of Linear and Embedding layers). Desired and
    output layouts become `activations` of the plan; `input_layouts` say there how a local tensor is to be read, which
    is nothing here. The model is the one for one device: heads are counted as a whole, not divided by the number of
    devices, and `use_local_output` has no meaning. `loss_parallel()` needs no counterpart: give the last layer
    `output_layouts=Shard(-1)`, and the loss is computed on logits that stay split.

    Args:
        model: Any module, on the meta device too: names, classes and shapes alone are read.
        mesh: Where it will lie.
        parallelize_plan: Styles by name of module, each token a pattern (`"layers.*.attn"`); or one, for the model.
        tp: The axis that stands for the one-dimensional `DeviceMesh` there.
        fsdp: The axis along which parameters are stored in pieces, as `fully_shard` does it after `parallelize_module`;
            here along the first whole dim that divides. None leaves them as the styles do.
        batch_spec: How activations are split over other axes, as the step takes it. By default the first dim is split
            over `"batch"`, if the mesh has this axis.
        ndim: The rank of activations, for `Shard(-1)` and `Replicate()` do not say it: of all, or by name or glob of
            modules (3 for the others). What an embedding takes has one dim less.
        strict: Whether a key that matches no module, and a parameter that does not divide, are errors. Else they are
            listed in a warning of the logger: a key does nothing, as there; a parameter stays whole, where there the
            last device has less.

    Raises:
        TypeError: `parallelize_plan` is neither a style nor a mapping of them; `tp` is no name, `ndim` no number.
        ValueError: The mesh lacks an axis; a style has no meaning here or for a module of this class, or two split one
            parameter; a layout does not fit the module's arguments or `ndim`; or what `strict` refuses. All together.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> mesh = ts.make_mesh(batch=4, model=2)
        >>> plan = ts.plans.from_dtensor(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> plan.rules["2.weight"], plan.activations["0"]
        (P(None, 'model'), P('batch', None, 'model'))
    """
    model = check_module("model", model)
    check_kind("tp", tp, str)
    check_axes(check_mesh(mesh), tp=tp, fsdp=fsdp)
    check_kind("batch_spec", batch_spec, PartitionSpec | None)
    reader = _Reader(model, parallelize_plan, layouts_of(mesh, tp, batch_spec, ndim))
    faults = [*reader.layouts.find_faults(model, mesh), *reader.faults]
    if reader.unmatched and strict:
        faults += [f'"{key}" matches no module.' for key in reader.unmatched]
    if faults:
        head = f"{caller()}: {len(faults)} {'thing' if len(faults) == 1 else 'things'} cannot be read."
        raise ValueError("\n".join([head, "", *(f"  {fault}" for fault in faults)]))
    if reader.unmatched:
        logger.warning("%s: these keys match no module, and do nothing: %s", caller(), ", ".join(reader.unmatched))
    decisions = reader.decide(mesh, fsdp)
    activations = places_with_globs(reader.constraints, model)
    return plan_of(model, decisions, strict=strict, activations=activations)


def _check_ndim(ndim: object) -> None:
    ranks = dict(cast(Mapping[object, object], ndim)) if isinstance(ndim, Mapping) else {"": ndim}
    odd = [(key, num) for key, num in ranks.items() if not isinstance(key, str) or not is_integer(num)]
    if odd:
        shown = ", ".join(f"{key!r}: {num!r}" if key != "" else repr(num) for key, num in odd)
        raise TypeError(f"{caller()}: ndim must be a whole number, or some by names or globs of modules; got {shown}.")


def layouts_of(mesh: Mesh, tp: str, batch_spec: PartitionSpec | None, ndim: int | Mapping[str, int]) -> Layouts:
    """What placements mean on a mesh."""
    from torch_shard._plans.dtensor_layouts import Layouts

    _check_ndim(ndim)
    if batch_spec is None:
        batch_spec = PartitionSpec("batch") if "batch" in mesh.shape and tp != "batch" else PartitionSpec()
    return Layouts(tp, batch_spec, ndim)


class _Reader:
    """What the styles of a plan ask for.

    Attributes:
        layouts: What placements mean.
        faults: What cannot be read.
        unmatched: Keys that name no module.
        constraints: On activations, by place; where hooks of two styles follow each other, the last one's.
    """

    def __init__(self, model: nn.Module, plan: object, layouts: Layouts) -> None:
        self.model, self.layouts = model, layouts
        self.faults, self.unmatched = list[str](), list[str]()
        self.constraints: dict[str, PartitionSpec] = {}
        self._claims: dict[int, tuple[int | None, str, str]] = {}  # of tensors: dim, who splits it, by which key
        owners: dict[int, str] = {}
        for key, style in _styles(plan).items():
            found = dict(_find(model, key))
            self.unmatched += [] if found else [key]
            for path, module in found.items():
                self._read(path, module, style, key)
                if type(style).__name__ in _SPLITTING and owners.setdefault(id(module), key) != key:
                    self.faults.append(
                        f'{path}: "{owners[id(module)]}" and "{key}" both split its parameters. Keep one.'
                    )

    def decide(self, mesh: Mesh, fsdp: Axes | None) -> dict[str, Decision]:
        """How each entry is split, and why."""
        split, tp = dict[str, Decision](), self.layouts.tp
        for name, entry in self.model.named_parameters(remove_duplicate=False):
            dim, _, reason = self._claims.get(id(entry), (None, "", "" if fsdp else "no style names it"))
            fault = "" if dim is None else find_uneven(entry, dim, tp, mesh)
            spec = PartitionSpec() if dim is None or fault else along(dim, entry.ndim, tp)
            split[name] = Decision(spec, reason, fault)
        return completed(self.model, split, mesh, fsdp=fsdp)

    def _read(self, path: str, module: nn.Module, style: ParallelStyle, key: str) -> None:
        if (fault := _find_class_fault(module, style)) is not None:
            self.faults.append(f"{path or 'the model'} ({key!r}): {fault}")
            return
        for name, entry, dim in _splits(module, style):
            claim = self._claims.setdefault(id(entry), (dim, path, f'{type(style).__name__} ("{key}")'))
            if claim[0] != dim and claim[1] != path:
                self.faults.append(f"{_join(path, name)}: it is tied to one of {claim[1]}, which is split otherwise.")
            elif dim is not None and dim >= entry.ndim:
                self.faults.append(
                    f"{_join(path, name)} {tuple(entry.shape)}: {type(style).__name__} splits its dim {dim}."
                )
        for argument, placement in _asked(module, style):
            if not isinstance(argument, str):
                self.faults.append(
                    f"{path or 'the model'} ({key!r}): its forward has no argument {argument} by position, for which "
                    f"{type(style).__name__} has a layout."
                )
                continue
            spec = self.layouts.spec_of(placement, self.layouts.rank(path, module, argument))
            if isinstance(spec, str):
                self.faults.append(f"{path or 'the model'} ({key!r}): {argument or 'what it returns'} {spec}.")
            else:
                self.constraints[f"{path}:{argument}" if argument else path] = spec


_SPLITTING = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")
"""Styles that make parameters DTensors, of which a module can have one."""


def _styles(plan: object) -> dict[str, ParallelStyle]:
    from torch.distributed.tensor.parallel import ParallelStyle

    styles = {"": plan} if isinstance(plan, ParallelStyle) else plan
    hint = 'Give what parallelize_module takes: {"layers.*.up": ColwiseParallel()}.'
    check_kind("parallelize_plan", styles, Mapping, hint=hint)
    odd = {k: v for k, v in cast(Mapping[object, object], styles).items() if not isinstance(v, ParallelStyle)}
    odd |= {k: v for k, v in cast(Mapping[object, object], styles).items() if not isinstance(k, str)}
    if odd:
        shown = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in odd.items())
        raise TypeError(f"{caller()}: parallelize_plan maps names of modules to styles, got {shown}.")
    return dict(cast(Mapping[str, "ParallelStyle"], styles))


def _find(model: nn.Module, key: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a key names: each token a pattern of `fnmatch` over the children; "" is the module itself."""
    tokens = key.split(".")
    found = {"": model}
    for token in tokens if tokens[-1] else tokens[:-1]:
        found = {
            _join(path, name): child
            for path, module in found.items()
            for name, child in module.named_children()
            if fnmatch(name, token)
        }
    yield from found.items()


def _find_class_fault(module: nn.Module, style: ParallelStyle) -> str | None:
    from torch.distributed.tensor import parallel

    known = (
        parallel.ColwiseParallel,
        parallel.RowwiseParallel,
        parallel.SequenceParallel,
        parallel.PrepareModuleInput,
        parallel.PrepareModuleOutput,
        parallel.PrepareModuleInputOutput,
    )
    if type(style) not in known:
        names = ", ".join(kind.__name__ for kind in known)
        return (
            f"{type(style).__name__} is a style of its own, and may do anything. Those with a meaning here are {names}."
        )
    if isinstance(style, known[:2]) and not isinstance(module, nn.Linear | nn.Embedding):
        kind = type(module).__name__
        return f"{type(style).__name__} is for nn.Linear and nn.Embedding, and this is a {kind}."
    return None


def _splits(module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """The parameters that a style makes DTensors, with the dim that it splits."""
    kind = type(style).__name__
    for name, entry in module.named_parameters() if kind in _SPLITTING else ():
        if kind == "SequenceParallel":
            yield name, entry, None
        elif kind == "ColwiseParallel":
            yield name, entry, 1 if isinstance(module, nn.Embedding) else 0
        elif isinstance(module, nn.Embedding):
            yield name, entry, 0
        else:
            yield name, entry, 1 if name == "weight" else None


def _asked(module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str | int, Placement]]:
    """The layouts that a style enforces, by argument of forward; "" is what is returned, a number no argument."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    if isinstance(style, parallel.ColwiseParallel):
        yield from _by_position(module, [Replicate()])
        yield "", style.output_layouts[0]
    elif isinstance(style, parallel.RowwiseParallel):
        yield from _by_position(module, [Replicate() if isinstance(module, nn.Embedding) else Shard(-1)])
        yield "", style.output_layouts[0]
    elif isinstance(style, parallel.SequenceParallel):
        yield from _by_position(module, [style.sequence_sharding[0]])
        yield "", style.sequence_sharding[0]
    elif isinstance(style, parallel.PrepareModuleInputOutput):
        yield from _asked(module, style.prepare_module_input)
        yield from _asked(module, style.prepare_module_output)
    elif isinstance(style, parallel.PrepareModuleInput):
        pairs = zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True)
        yield from _by_position(module, _enforced(pairs))
        for name, given in style.input_kwarg_layouts.items():
            enforced = _enforced([(given, style.desired_input_kwarg_layouts.get(name))])
            yield from ((name, placement) for placement in enforced if placement is not None)
    elif isinstance(style, parallel.PrepareModuleOutput):
        pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
        wanted = _enforced(pairs)
        for number, placement in enumerate(wanted):
            if placement is not None:
                yield "" if len(wanted) == 1 else f"return.{number}", placement


def _enforced(pairs: Iterable[tuple[Placement | None, Placement | None]]) -> list[Placement | None]:
    """The wanted layouts, but for what stays as it is: given without a layout, or whole and wanted whole."""
    return [None if given is None or (given == wanted and given.is_replicate()) else wanted for given, wanted in pairs]


def _by_position(module: nn.Module, wanted: list[Placement | None]) -> Iterator[tuple[str | int, Placement]]:
    names = positional(module)
    for number, placement in enumerate(wanted):
        if placement is not None:
            yield names[number] if number < len(names) else number, placement


def positional(module: nn.Module) -> list[str]:
    """The arguments that a module's forward takes by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in by_position]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
