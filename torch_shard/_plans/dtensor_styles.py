"""What the styles of `torch.distributed.tensor.parallel` ask for: splits of parameters, specs of activations."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import cast

from jax.sharding import Mesh, PartitionSpec
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ParallelStyle

from torch_shard._common.caller import caller
from torch_shard._common.specs import axes_of, describe_spec
from torch_shard._common.validate import check_kind, is_integer
from torch_shard._plans.decisions import Axes, Decision, along, completed, find_uneven, names_of
from torch_shard._sharding import make_matcher

_SPLITTING = (parallel.ColwiseParallel, parallel.RowwiseParallel, parallel.SequenceParallel)
"""Styles that make parameters DTensors, of which a module can have one."""

_KNOWN = (
    *_SPLITTING,
    parallel.PrepareModuleInput,
    parallel.PrepareModuleOutput,
    parallel.PrepareModuleInputOutput,
)


@dataclass(frozen=True)
class _Claim:
    """How a style splits a parameter: along which dim (None for whole), at which module, and the words for it."""

    dim: int | None
    path: str
    reason: str


class Reader:
    """What the styles of a plan ask for.

    Attributes:
        faults: What cannot be read, of them and of the arguments.
        unmatched: Keys that name no module.
        constraints: On activations, by place; where hooks of two styles follow each other, the last one's.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, tp: str, batch_spec: PartitionSpec, ndim: object) -> None:
        self.model = model
        self.mesh = mesh
        self._tp = tp
        self._batch_spec = batch_spec
        self._ranks = _ranks(ndim)
        self.unmatched = list[str]()
        self.constraints = dict[str, PartitionSpec]()
        self._claims: dict[int, _Claim] = {}
        """Who splits a parameter, by the id of its tensor: a tie has one."""

        names = [name for name, _ in model.named_modules()]
        self.faults = [f"ndim={num!r} must be a positive integer." for num in self._ranks.values() if num < 1]
        for key in self._ranks:
            if not any(map(make_matcher(key), names)):
                self.faults.append(f'ndim["{key}"] matches no module.')
        for axis in axes_of(batch_spec):
            if axis == tp or axis not in mesh.shape:
                of_tp = f'tp="{axis}". Activations are split over it as the styles say.'
                why = of_tp if axis == tp else "no axis of the mesh."
                self.faults.append(f'batch_spec={describe_spec(batch_spec)} names "{axis}", which is {why}')

    def read(self, plan: object) -> None:
        """Read all styles of a plan."""
        owners: dict[int, str] = {}
        for key, style in _styles(plan).items():
            modules = _find(self.model, key)
            if not modules:
                self.unmatched.append(key)
            for path, module in modules.items():
                self._read(path, module, style, key)
                if isinstance(style, _SPLITTING) and owners.setdefault(id(module), key) != key:
                    self.faults.append(
                        f'{path}: "{owners[id(module)]}" and "{key}" both split its parameters. Keep one.'
                    )

    def decide(self, fsdp: Axes | None) -> dict[str, Decision]:
        """How each entry is split, and why."""
        unclaimed = _Claim(None, "", "" if fsdp else "no style names it")
        split = dict[str, Decision]()
        for name, entry in self.model.named_parameters(remove_duplicate=False):
            claim = self._claims.get(id(entry), unclaimed)
            spec, fault = PartitionSpec(), ""
            if claim.dim is not None:
                fault = find_uneven(entry, claim.dim, self._tp, self.mesh)
                if not fault:
                    spec = along(claim.dim, entry.ndim, self._tp)
            split[name] = Decision(spec, claim.reason, fault)
        return completed(self.model, split, self.mesh, fsdp=fsdp)

    def _read(self, path: str, module: nn.Module, style: ParallelStyle, key: str) -> None:
        where = f"{path or 'the model'} ({key!r})"
        kind = type(style).__name__
        fault = _find_class_fault(module, style)
        if fault is not None:
            self.faults.append(f"{where}: {fault}")
            return

        if isinstance(style, _SPLITTING):
            for name, entry in module.named_parameters():
                dim = _split_dim(module, style, name)
                claim = self._claims.setdefault(id(entry), _Claim(dim, path, f'{kind} ("{key}")'))
                if claim.dim != dim and claim.path != path:
                    self.faults.append(
                        f"{_join(path, name)}: it is tied to one of {claim.path}, which is split otherwise."
                    )
                elif dim is not None and dim >= entry.ndim:
                    self.faults.append(f"{_join(path, name)} {tuple(entry.shape)}: {kind} splits its dim {dim}.")

        for argument, placement in _layouts(module, style):
            if not isinstance(argument, str):
                self.faults.append(
                    f"{where}: its forward has no argument {argument} by position, for which {kind} has a layout."
                )
                continue
            spec = self._spec_of(placement, self._rank(path, module, argument))
            if isinstance(spec, str):
                self.faults.append(f"{where}: {argument or 'what it returns'} {spec}.")
            else:
                self.constraints[f"{path}:{argument}" if argument else path] = spec

    def _rank(self, path: str, module: nn.Module, argument: str) -> int:
        """How many dims an activation has: numbers of rows, which an embedding takes, have one less."""
        ranks = (num for key, num in self._ranks.items() if make_matcher(key)(path))
        rank = next(ranks, 3)
        return max(rank - 1, 1) if isinstance(module, nn.Embedding) and argument else rank

    def _spec_of(self, placement: Placement, rank: int) -> PartitionSpec | str:
        """The spec of an activation, or why there is none."""
        parts = [*self._batch_spec, *(None for _ in range(rank))][:rank]
        if isinstance(placement, Replicate):
            return PartitionSpec(*parts)
        if type(placement) is not Shard:
            return f"asks for {placement}, which is how values are before they are summed, and no way to be split"
        if not -rank <= placement.dim < rank:
            return f"asks for {placement}, and ndim says that it has {rank} dims"
        parts[placement.dim] = (*names_of(parts[placement.dim]), self._tp)
        return PartitionSpec(*parts)


def _ranks(ndim: object) -> dict[str, int]:
    """The rank of activations by names or globs of modules."""
    ranks = dict(cast(Mapping[object, object], ndim)) if isinstance(ndim, Mapping) else {"**": ndim}
    odd = {key: num for key, num in ranks.items() if not isinstance(key, str) or not is_integer(num)}
    if odd:
        shown = ", ".join(f"{key!r}: {num!r}" for key, num in odd.items()) if isinstance(ndim, Mapping) else repr(ndim)
        raise TypeError(f"{caller()}: ndim must be a whole number, or some by names or globs of modules; got {shown}.")
    return cast(dict[str, int], ranks)


def _styles(plan: object) -> dict[str, ParallelStyle]:
    styles = {"": plan} if isinstance(plan, ParallelStyle) else plan
    hint = 'Give what parallelize_module takes: {"layers.*.up": ColwiseParallel()}.'
    check_kind("parallelize_plan", styles, Mapping, hint=hint)
    items = cast(Mapping[object, object], styles).items()
    odd = [(key, style) for key, style in items if not (isinstance(key, str) and isinstance(style, ParallelStyle))]
    if odd:
        shown = ", ".join(f"{key!r}: {type(style).__name__}" for key, style in odd)
        raise TypeError(f"{caller()}: parallelize_plan maps names of modules to styles, got {shown}.")
    return dict(cast(Mapping[str, ParallelStyle], styles))


def _find(model: nn.Module, key: str) -> dict[str, nn.Module]:
    """The modules that a key names: each token a pattern of `fnmatch` over the children; "" is the module itself."""
    tokens = key.split(".")
    # `parallelize_module` lets a name end in a dot, and takes the module before it.
    if not tokens[-1]:
        tokens.pop()
    modules = {"": model}
    for token in tokens:
        children = dict[str, nn.Module]()
        for path, module in modules.items():
            for name, child in module.named_children():
                if fnmatch(name, token):
                    children[_join(path, name)] = child
        modules = children
    return modules


def _find_class_fault(module: nn.Module, style: ParallelStyle) -> str | None:
    name = type(style).__name__
    if type(style) not in _KNOWN:
        names = ", ".join(kind.__name__ for kind in _KNOWN)
        return f"{name} is a style of its own, and may do anything. Those with a meaning here are {names}."
    if isinstance(style, _SPLITTING[:2]) and not isinstance(module, nn.Linear | nn.Embedding):
        return f"{name} is for nn.Linear and nn.Embedding, and this is a {type(module).__name__}."
    return None


def _split_dim(module: nn.Module, style: ParallelStyle, name: str) -> int | None:
    """The dim of a parameter that a style splits."""
    if isinstance(style, parallel.SequenceParallel):
        return None
    is_column = isinstance(style, parallel.ColwiseParallel)
    if isinstance(module, nn.Embedding):
        return 1 if is_column else 0
    return 0 if is_column else 1 if name == "weight" else None


def _layouts(module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str | int, Placement]]:
    """The layouts that a style enforces, by argument of forward; "" is what is returned, a number no argument."""
    match style:
        case parallel.SequenceParallel():
            yield from _by_position(module, [style.sequence_sharding[0]])
            yield "", style.sequence_sharding[0]
        case parallel.ColwiseParallel() | parallel.RowwiseParallel():
            # A row layer sums over the features that each device has; an embedding is given numbers of rows, whole.
            is_row = isinstance(style, parallel.RowwiseParallel) and not isinstance(module, nn.Embedding)
            yield from _by_position(module, [Shard(-1) if is_row else Replicate()])
            yield "", style.output_layouts[0]
        case parallel.PrepareModuleInputOutput():
            yield from _layouts(module, style.prepare_module_input)
            yield from _layouts(module, style.prepare_module_output)
        case parallel.PrepareModuleInput():
            yield from _by_position(module, _enforced(style.input_layouts or (), style.desired_input_layouts or ()))
            before = style.input_kwarg_layouts
            wanted = _enforced(before.values(), map(style.desired_input_kwarg_layouts.get, before))
            for name, placement in zip(before, wanted, strict=True):
                if placement is not None:
                    yield name, placement
        case parallel.PrepareModuleOutput():
            layouts = _enforced(style.output_layouts, style.desired_output_layouts)
            for number, placement in enumerate(layouts):
                if placement is not None:
                    yield "" if len(layouts) == 1 else f"return.{number}", placement
        case _:
            pass


def _enforced(before: Iterable[Placement | None], wanted: Iterable[Placement | None]) -> list[Placement | None]:
    """The wanted layouts, but for what stays as it is: given without a layout, or whole and wanted whole."""
    enforced = list[Placement | None]()
    for layout, desired in zip(before, wanted, strict=True):
        stays = layout is None or (layout == desired and layout.is_replicate())
        enforced.append(None if stays else desired)
    return enforced


def _by_position(module: nn.Module, wanted: list[Placement | None]) -> Iterator[tuple[str | int, Placement]]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    for number, placement in enumerate(wanted):
        if placement is not None:
            yield names[number] if number < len(names) else number, placement


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
