"""What the styles of `torch.distributed.tensor.parallel` ask for: splits of parameters, specs of activations."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import inspect
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import cast

from jax.sharding import Mesh, PartitionSpec
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ParallelStyle

from torch_shard._common.caller import caller
from torch_shard._common.validate import check_kind, is_integer
from torch_shard._plans.decisions import Axes, Decision, along, completed, find_uneven, names_of
from torch_shard._sharding import axes_of, describe_spec, make_matcher

_SPLITTING = (parallel.ColwiseParallel, parallel.RowwiseParallel, parallel.SequenceParallel)
"""Styles that make parameters DTensors, of which a module can have one."""

_KNOWN = (
    *_SPLITTING,
    parallel.PrepareModuleInput,
    parallel.PrepareModuleOutput,
    parallel.PrepareModuleInputOutput,
)


class Reader:
    """What the styles of a plan ask for.

    Attributes:
        faults: What cannot be read, of them and of the arguments.
        unmatched: Keys that name no module.
        constraints: On activations, by place; where hooks of two styles follow each other, the last one's.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, tp: str, batch_spec: PartitionSpec, ndim: object) -> None:
        self.model, self.mesh, self._tp, self._batch_spec = model, mesh, tp, batch_spec
        self._ranks = _ranks(ndim)
        names = [name for name, _ in model.named_modules()]
        self.faults = [f"ndim={num!r} must be a positive integer." for num in self._ranks.values() if num < 1]
        self.faults += [f'ndim["{k}"] matches no module.' for k in self._ranks if not any(map(make_matcher(k), names))]
        for axis in axes_of(batch_spec):
            if axis == tp or axis not in mesh.shape:
                of_tp = f'tp="{axis}". Activations are split over it as the styles say.'
                why = of_tp if axis == tp else "no axis of the mesh."
                self.faults.append(f'batch_spec={describe_spec(batch_spec)} names "{axis}", which is {why}')
        self.unmatched, self.constraints = list[str](), dict[str, PartitionSpec]()
        self._claims: dict[int, tuple[int | None, str, str]] = {}  # of tensors: dim, who splits it, by which key

    def read(self, plan: object) -> None:
        """Read all styles of a plan."""
        owners: dict[int, str] = {}
        for key, style in _styles(plan).items():
            found = _find(self.model, key)
            self.unmatched += [] if found else [key]
            for path, module in found.items():
                self._read(path, module, style, key)
                if isinstance(style, _SPLITTING) and owners.setdefault(id(module), key) != key:
                    self.faults.append(
                        f'{path}: "{owners[id(module)]}" and "{key}" both split its parameters. Keep one.'
                    )

    def decide(self, fsdp: Axes | None) -> dict[str, Decision]:
        """How each entry is split, and why."""
        split = dict[str, Decision]()
        for name, entry in self.model.named_parameters(remove_duplicate=False):
            dim, _, reason = self._claims.get(id(entry), (None, "", "" if fsdp else "no style names it"))
            fault = "" if dim is None else find_uneven(entry, dim, self._tp, self.mesh)
            spec = PartitionSpec() if dim is None or fault else along(dim, entry.ndim, self._tp)
            split[name] = Decision(spec, reason, fault)
        return completed(self.model, split, self.mesh, fsdp=fsdp)

    def _read(self, path: str, module: nn.Module, style: ParallelStyle, key: str) -> None:
        where, kind = f"{path or 'the model'} ({key!r})", type(style).__name__
        if (fault := _find_class_fault(module, style)) is not None:
            self.faults.append(f"{where}: {fault}")
            return
        for name, entry in module.named_parameters() if isinstance(style, _SPLITTING) else ():
            dim = _split_dim(module, style, name)
            claim = self._claims.setdefault(id(entry), (dim, path, f'{kind} ("{key}")'))
            if claim[0] != dim and claim[1] != path:
                self.faults.append(f"{_join(path, name)}: it is tied to one of {claim[1]}, which is split otherwise.")
            elif dim is not None and dim >= entry.ndim:
                self.faults.append(f"{_join(path, name)} {tuple(entry.shape)}: {kind} splits its dim {dim}.")
        for argument, placement in _asked(module, style):
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
        found = next((num for key, num in self._ranks.items() if make_matcher(key)(path)), 3)
        return max(found - 1, 1) if isinstance(module, nn.Embedding) and argument else found

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
    if odd := [(key, style) for key, style in items if not (isinstance(key, str) and isinstance(style, ParallelStyle))]:
        shown = ", ".join(f"{key!r}: {type(style).__name__}" for key, style in odd)
        raise TypeError(f"{caller()}: parallelize_plan maps names of modules to styles, got {shown}.")
    return dict(cast(Mapping[str, ParallelStyle], styles))


def _find(model: nn.Module, key: str) -> dict[str, nn.Module]:
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
    return found


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


def _asked(module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str | int, Placement]]:
    """The layouts that a style enforces, by argument of forward; "" is what is returned, a number no argument."""
    if isinstance(style, parallel.SequenceParallel):
        yield from _by_position(module, [style.sequence_sharding[0]])
        yield "", style.sequence_sharding[0]
    elif isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel):
        is_row = isinstance(style, parallel.RowwiseParallel) and not isinstance(module, nn.Embedding)
        yield from _by_position(module, [Shard(-1) if is_row else Replicate()])
        yield "", style.output_layouts[0]
    elif isinstance(style, parallel.PrepareModuleInputOutput):
        yield from _asked(module, style.prepare_module_input)
        yield from _asked(module, style.prepare_module_output)
    elif isinstance(style, parallel.PrepareModuleInput):
        yield from _by_position(module, _enforced(style.input_layouts or (), style.desired_input_layouts or ()))
        given, wanted = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
        named = zip(given, _enforced(given.values(), map(wanted.get, given)), strict=True)
        yield from ((name, placement) for name, placement in named if placement is not None)
    elif isinstance(style, parallel.PrepareModuleOutput):
        layouts = _enforced(style.output_layouts, style.desired_output_layouts)
        for number, placement in enumerate(layouts):
            if placement is not None:
                yield "" if len(layouts) == 1 else f"return.{number}", placement


def _enforced(given: Iterable[Placement | None], wanted: Iterable[Placement | None]) -> list[Placement | None]:
    """The wanted layouts, but for what stays as it is: given without a layout, or whole and wanted whole."""
    return [
        None if has is None or (has == to and has.is_replicate()) else to for has, to in zip(given, wanted, strict=True)
    ]


def _by_position(module: nn.Module, wanted: list[Placement | None]) -> Iterator[tuple[str | int, Placement]]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in by_position]
    for number, placement in enumerate(wanted):
        if placement is not None:
            yield names[number] if number < len(names) else number, placement


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
